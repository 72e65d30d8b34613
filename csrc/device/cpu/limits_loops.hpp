// The loops behind limits.cpp, one for each kind and instruction set. Each runs `rounds` times over its work and returns a value that depends on all of it, so
// that nothing can be left out by the compiler.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(LILY_X86)
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // gcc 12 finds them in its own header
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
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
  V acc[16] = {}, x = {0.5f, 0.25f, 0.125f, 0.75f}, y = {1, 2, 3, 4};
  for (uint64_t r = 0; r < rounds; r++)
    for (V& v : acc) v = v * x + y;
  float sum = 0;
  for (V& v : acc) sum += v[0];
  return sum;
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
  __m256 acc[12], x = _mm256_set1_ps(0.5f), y = _mm256_set1_ps(1);
  for (__m256& v : acc) v = y;
  for (uint64_t r = 0; r < rounds; r++)
#pragma GCC unroll 12
    for (int i = 0; i < 12; i++) {
      acc[i] = _mm256_fmadd_ps(acc[i], x, y);
      asm volatile("" : "+x"(acc[i]));
    }
  float sum = 0;
  for (__m256& v : acc) sum += _mm256_cvtss_f32(v);
  return sum;
}

__attribute__((target("avx512f"))) inline float fma_avx512(uint64_t rounds) {
  __m512 acc[16], x = _mm512_set1_ps(0.5f), y = _mm512_set1_ps(1);
  for (__m512& v : acc) v = y;
  for (uint64_t r = 0; r < rounds; r++)
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
      acc[i] = _mm512_fmadd_ps(acc[i], x, y);
      asm volatile("" : "+v"(acc[i]));
    }
  float sum = 0;
  for (__m512& v : acc) sum += _mm512_cvtss_f32(v);
  return sum;
}

__attribute__((target("avx512f,avx512bw,avx512vnni"))) inline int int8_vnni(uint64_t rounds) {
  __m512i acc[16], x = _mm512_set1_epi8(3), y = _mm512_set1_epi8(1);
  for (__m512i& v : acc) v = _mm512_setzero_si512();
  for (uint64_t r = 0; r < rounds; r++)
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
      acc[i] = _mm512_dpbusd_epi32(acc[i], x, y);
      asm volatile("" : "+v"(acc[i]));
    }
  int sum = 0;
  for (__m512i& v : acc) sum += _mm_cvtsi128_si32(_mm512_castsi512_si128(v));
  return sum;
}

// Sixteen table entries in one register; the lookup reads the low four bits of each lane.
__attribute__((target("avx512f"))) inline float lookup_avx512(const uint32_t* codes, const float* table, uint64_t rounds) {
  const __m512 t = _mm512_loadu_ps(table), one = _mm512_set1_ps(1);
  __m512 acc[8];
  for (__m512& v : acc) v = _mm512_setzero_ps();
  for (uint64_t r = 0; r < rounds; r++)
    for (uint64_t i = 0; i < kLookupWords; i += 16) {
      __m512i w = _mm512_loadu_si512(codes + i);
#pragma GCC unroll 8
      for (int k = 0; k < 8; k++) acc[k] = _mm512_fmadd_ps(_mm512_permutexvar_ps(_mm512_srli_epi32(w, 4 * k), t), one, acc[k]);
    }
  float sum = 0;
  for (__m512& v : acc) sum += _mm512_cvtss_f32(v);
  return sum;
}

// Two tables of eight entries, the fourth bit chooses.
__attribute__((target("avx2,fma"))) inline float lookup_avx2(const uint32_t* codes, const float* table, uint64_t rounds) {
  const __m256 low = _mm256_loadu_ps(table), high = _mm256_loadu_ps(table + 8), one = _mm256_set1_ps(1);
  __m256 acc[8];
  for (__m256& v : acc) v = _mm256_setzero_ps();
  for (uint64_t r = 0; r < rounds; r++)
    for (uint64_t i = 0; i < kLookupWords; i += 8) {
      __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + i));
#pragma GCC unroll 8
      for (int k = 0; k < 8; k++) {
        __m256i q = _mm256_srli_epi32(w, 4 * k);
        __m256 sign = _mm256_castsi256_ps(_mm256_slli_epi32(q, 28));
        acc[k] = _mm256_fmadd_ps(_mm256_blendv_ps(_mm256_permutevar8x32_ps(low, q), _mm256_permutevar8x32_ps(high, q), sign), one, acc[k]);
      }
    }
  float sum = 0;
  for (__m256& v : acc) sum += _mm256_cvtss_f32(v);
  return sum;
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
  float32x4_t acc[16], x = vdupq_n_f32(0.5f), y = vdupq_n_f32(1);
  for (float32x4_t& v : acc) v = y;
  for (uint64_t r = 0; r < rounds; r++)
    for (float32x4_t& v : acc) {
      v = vfmaq_f32(y, v, x);
      asm volatile("" : "+w"(v));
    }
  float sum = 0;
  for (float32x4_t& v : acc) sum += vgetq_lane_f32(v, 0);
  return sum;
}
#endif

}  // namespace lily::limits
