// The loops behind limits.cpp, one for each kind and instruction set. Each runs `rounds` times over its work and returns a value that depends on all of it, so
// that nothing can be left out by the compiler.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(LILY_X86)
#include <immintrin.h>
#endif
#if defined(LILY_ARM)
#include <arm_neon.h>
#endif

namespace lily::limits {

constexpr uint64_t kLineBytes = 64;

// Work of one round: operations, or codes.
constexpr double kFmaOps512 = 16 * 16 * 2, kFmaOps256 = 12 * 8 * 2, kFmaOps128 = 16 * 4 * 2, kInt8Ops = 16 * 64 * 2;
constexpr double kAmxBf16Ops = 4 * 16 * 16 * 32 * 2, kAmxInt8Ops = 4 * 16 * 16 * 64 * 2;
constexpr uint64_t kLookupWords = 4096;  // 16 KiB of codes, eight in each word

// Running sums are variables of their own: an array that is also walked by a loop would live in memory.
#define LILY_EACH8(f) f(0) f(1) f(2) f(3) f(4) f(5) f(6) f(7)
#define LILY_EACH12(f) LILY_EACH8(f) f(8) f(9) f(10) f(11)
#define LILY_EACH16(f) LILY_EACH12(f) f(12) f(13) f(14) f(15)

typedef uint64_t Words __attribute__((vector_size(64), may_alias));

inline uint64_t total(const Words& w) {
  uint64_t sum = 0;
  for (int i = 0; i < 8; i++) sum += w[i];
  return sum;
}

#define LILY_READ_LOOP                                                               \
  Words a{}, b{}, c{}, d{};                                                          \
  const Words* p = reinterpret_cast<const Words*>(data);                             \
  uint64_t n = bytes / sizeof(Words), i = 0;                                         \
  for (; i + 4 <= n; i += 4) a += p[i], b += p[i + 1], c += p[i + 2], d += p[i + 3]; \
  for (; i < n; i++) a += p[i];                                                      \
  a += b + c + d;                                                                    \
  return total(a);

inline uint64_t read_portable(const uint8_t* data, uint64_t bytes) { LILY_READ_LOOP }

inline float fma_portable(uint64_t rounds) {
  typedef float V __attribute__((vector_size(16)));
  V x = {0.5f, 0.25f, 0.125f, 0.75f}, y = {1, 2, 3, 4};
#define LILY_START(i) V a##i = y;
#define LILY_STEP(i) a##i = a##i * x + y;
#define LILY_SUM(i) +a##i[0]
  LILY_EACH16(LILY_START)
  for (uint64_t r = 0; r < rounds; r++) {
    LILY_EACH16(LILY_STEP)
  }
  return 0 LILY_EACH16(LILY_SUM);
#undef LILY_START
#undef LILY_STEP
#undef LILY_SUM
}

inline float lookup_portable(const uint32_t* codes, const float* table, uint64_t rounds) {
  float sum[4] = {};
  for (uint64_t r = 0; r < rounds; r++)
    for (uint64_t i = 0; i < kLookupWords; i++)
      for (int k = 0; k < 8; k++) sum[k & 3] += table[codes[i] >> (4 * k) & 15];
  return sum[0] + sum[1] + sum[2] + sum[3];
}

#if defined(LILY_X86)
__attribute__((target("avx2"))) inline uint64_t read_avx2(const uint8_t* data, uint64_t bytes) { LILY_READ_LOOP }
__attribute__((target("avx512f"))) inline uint64_t read_avx512(const uint8_t* data, uint64_t bytes) { LILY_READ_LOOP }

__attribute__((target("avx2,fma"))) inline float fma_avx2(uint64_t rounds) {
  const __m256 x = _mm256_set1_ps(0.5f), y = _mm256_set1_ps(1);
#define LILY_START(i) __m256 a##i = y;
#define LILY_STEP(i)                  \
  a##i = _mm256_fmadd_ps(a##i, x, y); \
  asm volatile("" : "+x"(a##i));
#define LILY_SUM(i) +_mm256_cvtss_f32(a##i)
  LILY_EACH12(LILY_START)
  for (uint64_t r = 0; r < rounds; r++) {
    LILY_EACH12(LILY_STEP)
  }
  return 0 LILY_EACH12(LILY_SUM);
#undef LILY_START
#undef LILY_STEP
#undef LILY_SUM
}

__attribute__((target("avx512f"))) inline float fma_avx512(uint64_t rounds) {
  const __m512 x = _mm512_set1_ps(0.5f), y = _mm512_set1_ps(1);
#define LILY_START(i) __m512 a##i = y;
#define LILY_STEP(i)                  \
  a##i = _mm512_fmadd_ps(a##i, x, y); \
  asm volatile("" : "+v"(a##i));
#define LILY_SUM(i) +_mm512_cvtss_f32(a##i)
  LILY_EACH16(LILY_START)
  for (uint64_t r = 0; r < rounds; r++) {
    LILY_EACH16(LILY_STEP)
  }
  return 0 LILY_EACH16(LILY_SUM);
#undef LILY_START
#undef LILY_STEP
#undef LILY_SUM
}

__attribute__((target("avx512f,avx512bw,avx512vnni"))) inline int int8_vnni(uint64_t rounds) {
  const __m512i x = _mm512_set1_epi8(3), y = _mm512_set1_epi8(1);
#define LILY_START(i) __m512i a##i = _mm512_setzero_si512();
#define LILY_STEP(i)                      \
  a##i = _mm512_dpbusd_epi32(a##i, x, y); \
  asm volatile("" : "+v"(a##i));
#define LILY_SUM(i) +_mm_cvtsi128_si32(_mm512_castsi512_si128(a##i))
  LILY_EACH16(LILY_START)
  for (uint64_t r = 0; r < rounds; r++) {
    LILY_EACH16(LILY_STEP)
  }
  return 0 LILY_EACH16(LILY_SUM);
#undef LILY_START
#undef LILY_STEP
#undef LILY_SUM
}

// Sixteen table entries in one register; the lookup reads the low four bits of each lane.
__attribute__((target("avx512f"))) inline float lookup_avx512(const uint32_t* codes, const float* table, uint64_t rounds) {
  const __m512 t = _mm512_loadu_ps(table), one = _mm512_set1_ps(1);
#define LILY_START(i) __m512 a##i = _mm512_setzero_ps();
#define LILY_STEP(i) a##i = _mm512_fmadd_ps(_mm512_permutexvar_ps(_mm512_srli_epi32(w, 4 * i), t), one, a##i);
#define LILY_SUM(i) +_mm512_cvtss_f32(a##i)
  LILY_EACH8(LILY_START)
  for (uint64_t r = 0; r < rounds; r++)
    for (uint64_t n = 0; n < kLookupWords; n += 16) {
      const __m512i w = _mm512_loadu_si512(codes + n);
      LILY_EACH8(LILY_STEP)
    }
  return 0 LILY_EACH8(LILY_SUM);
#undef LILY_START
#undef LILY_STEP
#undef LILY_SUM
}

// Two tables of eight entries, the fourth bit chooses.
__attribute__((target("avx2,fma"))) inline float lookup_avx2(const uint32_t* codes, const float* table, uint64_t rounds) {
  const __m256 low = _mm256_loadu_ps(table), high = _mm256_loadu_ps(table + 8), one = _mm256_set1_ps(1);
#define LILY_START(i) __m256 a##i = _mm256_setzero_ps();
#define LILY_STEP(i)                                                                                                                            \
  q = _mm256_srli_epi32(w, 4 * i);                                                                                                              \
  found = _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, q), _mm256_permutevar8x32_ps(high, q), _mm256_castsi256_ps(_mm256_slli_epi32(q, 28))); \
  a##i = _mm256_fmadd_ps(found, one, a##i);
#define LILY_SUM(i) +_mm256_cvtss_f32(a##i)
  LILY_EACH8(LILY_START)
  for (uint64_t r = 0; r < rounds; r++)
    for (uint64_t n = 0; n < kLookupWords; n += 8) {
      const __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + n));
      __m256i q;
      __m256 found;
      LILY_EACH8(LILY_STEP)
    }
  return 0 LILY_EACH8(LILY_SUM);
#undef LILY_START
#undef LILY_STEP
#undef LILY_SUM
}

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileConfig) == 64);

// Four independent products of whole tiles in each round, operands in registers.
__attribute__((target("amx-tile,amx-bf16,amx-int8"))) inline int amx(uint64_t rounds, bool int8) {
  const TileConfig config;
  asm volatile("ldtilecfg %0" ::"m"(config));  // all 64 bytes are the operand
  asm volatile("tilezero %%tmm0\n\ttilezero %%tmm1\n\ttilezero %%tmm2\n\ttilezero %%tmm3\n\ttilezero %%tmm4\n\ttilezero %%tmm5\n\ttilezero %%tmm6\n\ttilezero %%tmm7" ::: "memory");
  if (int8)
    for (uint64_t r = 0; r < rounds; r++)
      asm volatile("tdpbssd %%tmm6, %%tmm4, %%tmm0\n\ttdpbssd %%tmm7, %%tmm4, %%tmm1\n\ttdpbssd %%tmm6, %%tmm5, %%tmm2\n\ttdpbssd %%tmm7, %%tmm5, %%tmm3" ::: "memory");
  else
    for (uint64_t r = 0; r < rounds; r++)
      asm volatile("tdpbf16ps %%tmm6, %%tmm4, %%tmm0\n\ttdpbf16ps %%tmm7, %%tmm4, %%tmm1\n\ttdpbf16ps %%tmm6, %%tmm5, %%tmm2\n\ttdpbf16ps %%tmm7, %%tmm5, %%tmm3" ::: "memory");
  asm volatile("tilerelease" ::: "memory");
  return int(rounds);
}
#endif

#if defined(LILY_ARM)
inline float fma_neon(uint64_t rounds) {
  const float32x4_t x = vdupq_n_f32(0.5f), y = vdupq_n_f32(1);
#define LILY_START(i) float32x4_t a##i = y;
#define LILY_STEP(i)            \
  a##i = vfmaq_f32(y, a##i, x); \
  asm volatile("" : "+w"(a##i));
#define LILY_SUM(i) +vgetq_lane_f32(a##i, 0)
  LILY_EACH16(LILY_START)
  for (uint64_t r = 0; r < rounds; r++) {
    LILY_EACH16(LILY_STEP)
  }
  return 0 LILY_EACH16(LILY_SUM);
#undef LILY_START
#undef LILY_STEP
#undef LILY_SUM
}
#endif

}  // namespace lily::limits
