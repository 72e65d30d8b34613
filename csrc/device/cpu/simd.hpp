// Sixteen floats at a time, with the same lane order, the same order of sums and the same fused multiply-adds on AVX2, AVX-512 and NEON, so
// that they agree bit for bit. The portable form multiplies and adds separately. All loads and stores accept any address.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__AVX2__) || defined(__AVX512F__)
#pragma GCC diagnostic push
#if defined(__GNUC__) && !defined(__clang__)  // gcc 12 takes its own "undefined" vectors for mistakes
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#pragma GCC diagnostic pop
#elif defined(LILY_NEON)  // set for the namespace neon: portable code on the same processor has no macro of its own
#include <arm_neon.h>
#endif

#ifndef LILY_CPU_NS
#error "compile kernel files with LILY_CPU_NS set"
#endif

#define LILY_INLINE static inline __attribute__((always_inline))
// For loops around an exponential, which at every use would dominate the size and the build time of a file, and for what is rare.
#define LILY_OUTLINE static inline __attribute__((noinline))

#if defined(__clang__)
#define LILY_UNROLL _Pragma("unroll")
#else
#define LILY_UNROLL _Pragma("GCC unroll 16")
#endif

namespace lily::cpu::LILY_CPU_NS {

struct Bf16 { uint16_t bits; };  // activation storage as shipped
struct F32 { float value; };     // activation storage of the debug mode

LILY_INLINE uint32_t float_bits(float f) { uint32_t u; std::memcpy(&u, &f, 4); return u; }
LILY_INLINE float bits_float(uint32_t u) { float f; std::memcpy(&f, &u, 4); return f; }
LILY_INLINE float bf16_float(uint16_t v) { return bits_float(uint32_t(v) << 16); }
LILY_INLINE uint16_t float_bf16(float f) {
  uint32_t b = float_bits(f);
  if ((b & 0x7fffffffu) > 0x7f800000u) return uint16_t((b >> 16) | 0x40);
  return uint16_t((b + 0x7fffu + ((b >> 16) & 1)) >> 16);
}
template <class T> LILY_INLINE T load_any(const void* p) { T v; std::memcpy(&v, p, sizeof(T)); return v; }

#if defined(__AVX512F__)
struct V { __m512 v; };
struct U { __m512i v; };
LILY_INLINE V zero() { return {_mm512_setzero_ps()}; }
LILY_INLINE V splat(float x) { return {_mm512_set1_ps(x)}; }
LILY_INLINE V load(const float* p) { return {_mm512_loadu_ps(p)}; }
LILY_INLINE void store(float* p, V a) { _mm512_storeu_ps(p, a.v); }
LILY_INLINE V add(V a, V b) { return {_mm512_add_ps(a.v, b.v)}; }
LILY_INLINE V sub(V a, V b) { return {_mm512_sub_ps(a.v, b.v)}; }
LILY_INLINE V mul(V a, V b) { return {_mm512_mul_ps(a.v, b.v)}; }
LILY_INLINE V div(V a, V b) { return {_mm512_div_ps(a.v, b.v)}; }
LILY_INLINE V max(V a, V b) { return {_mm512_max_ps(a.v, b.v)}; }
LILY_INLINE V min(V a, V b) { return {_mm512_min_ps(a.v, b.v)}; }
LILY_INLINE V fma(V a, V b, V c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }  // a*b + c
LILY_INLINE V round_nearest(V a) { return {_mm512_roundscale_ps(a.v, 0)}; }
LILY_INLINE U to_int(V a) { return {_mm512_cvtps_epi32(a.v)}; }                 // values already integral
LILY_INLINE V to_float(U a) { return {_mm512_cvtepi32_ps(a.v)}; }               // signed
LILY_INLINE U loadu(const void* p) { return {_mm512_loadu_si512(p)}; }          // 16 little-endian u32
LILY_INLINE U splatu(uint32_t x) { return {_mm512_set1_epi32(int(x))}; }
LILY_INLINE U addu(U a, U b) { return {_mm512_add_epi32(a.v, b.v)}; }
LILY_INLINE U andu(U a, U b) { return {_mm512_and_si512(a.v, b.v)}; }
LILY_INLINE U oru(U a, U b) { return {_mm512_or_si512(a.v, b.v)}; }
template <int n> LILY_INLINE U shl(U a) { return {_mm512_slli_epi32(a.v, n)}; }
template <int n> LILY_INLINE U shr(U a) { return {_mm512_srli_epi32(a.v, n)}; }
LILY_INLINE U shrv(U a, U n) { return {_mm512_srlv_epi32(a.v, n.v)}; }  // each lane by its own count
LILY_INLINE U bits(V a) { return {_mm512_castps_si512(a.v)}; }
LILY_INLINE V from_bits(U a) { return {_mm512_castsi512_ps(a.v)}; }
LILY_INLINE V permute(V table, U index) { return {_mm512_permutexvar_ps(index.v, table.v)}; }  // lane i = table[index[i] & 15]
LILY_INLINE U load_u8(const void* p) { return {_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p))}; }
LILY_INLINE U load_u16(const void* p) { return {_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p))}; }
LILY_INLINE void store_u16(void* p, U a) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(a.v)); }
LILY_INLINE U gather_u32(const void* p, U byte_offset) { return {_mm512_i32gather_epi32(byte_offset.v, p, 1)}; }
template <int n> LILY_INLINE U sar(U a) { return {_mm512_srai_epi32(a.v, n)}; }  // signed
LILY_INLINE void store_low_bytes(uint8_t* p, U a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(a.v)); }
LILY_INLINE void split_bytes(const uint8_t* p, uint8_t* even, uint8_t* odd) {  // 64 bytes in pairs
  __m512i pairs = _mm512_loadu_si512(p);
  _mm256_storeu_si256((__m256i*)even, _mm512_cvtepi16_epi8(pairs));
  _mm256_storeu_si256((__m256i*)odd, _mm512_cvtepi16_epi8(_mm512_srli_epi16(pairs, 8)));
}
LILY_INLINE float reduce_add(V a) {
  __m256 b = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a.v), 1)));
  __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
  c = _mm_add_ps(c, _mm_movehl_ps(c, c));
  return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
}
#elif defined(__AVX2__)
struct V { __m256 lo, hi; };
struct U { __m256i lo, hi; };
LILY_INLINE V zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
LILY_INLINE V splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
LILY_INLINE V load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
LILY_INLINE void store(float* p, V a) { _mm256_storeu_ps(p, a.lo); _mm256_storeu_ps(p + 8, a.hi); }
LILY_INLINE V add(V a, V b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
LILY_INLINE V sub(V a, V b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
LILY_INLINE V mul(V a, V b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
LILY_INLINE V div(V a, V b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
LILY_INLINE V max(V a, V b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
LILY_INLINE V min(V a, V b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
LILY_INLINE V fma(V a, V b, V c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
LILY_INLINE V round_nearest(V a) { return {_mm256_round_ps(a.lo, 8), _mm256_round_ps(a.hi, 8)}; }
LILY_INLINE U to_int(V a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }
LILY_INLINE V to_float(U a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
LILY_INLINE U loadu(const void* p) { return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)((const char*)p + 32))}; }
LILY_INLINE U splatu(uint32_t x) { return {_mm256_set1_epi32(int(x)), _mm256_set1_epi32(int(x))}; }
LILY_INLINE U addu(U a, U b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
LILY_INLINE U andu(U a, U b) { return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)}; }
LILY_INLINE U oru(U a, U b) { return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)}; }
template <int n> LILY_INLINE U shl(U a) { return {_mm256_slli_epi32(a.lo, n), _mm256_slli_epi32(a.hi, n)}; }
template <int n> LILY_INLINE U shr(U a) { return {_mm256_srli_epi32(a.lo, n), _mm256_srli_epi32(a.hi, n)}; }
LILY_INLINE U shrv(U a, U n) { return {_mm256_srlv_epi32(a.lo, n.lo), _mm256_srlv_epi32(a.hi, n.hi)}; }
LILY_INLINE U bits(V a) { return {_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)}; }
LILY_INLINE V from_bits(U a) { return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)}; }
LILY_INLINE __m256 permute_half(V t, __m256i i) {
  __m256 low = _mm256_permutevar8x32_ps(t.lo, i), high = _mm256_permutevar8x32_ps(t.hi, i);
  return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(i, 28)));
}
LILY_INLINE V permute(V table, U index) { return {permute_half(table, index.lo), permute_half(table, index.hi)}; }
LILY_INLINE U load_u8(const void* p) {
  __m128i b = _mm_loadu_si128((const __m128i*)p);
  return {_mm256_cvtepu8_epi32(b), _mm256_cvtepu8_epi32(_mm_srli_si128(b, 8))};
}
LILY_INLINE U load_u16(const void* p) {
  return {_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)((const char*)p + 16)))};
}
LILY_INLINE void store_u16(void* p, U a) {  // values below 65536
  __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(a.lo, a.hi), 0xd8);
  _mm256_storeu_si256((__m256i*)p, packed);
}
LILY_INLINE U gather_u32(const void* p, U o) { return {_mm256_i32gather_epi32((const int*)p, o.lo, 1), _mm256_i32gather_epi32((const int*)p, o.hi, 1)}; }
template <int n> LILY_INLINE U sar(U a) { return {_mm256_srai_epi32(a.lo, n), _mm256_srai_epi32(a.hi, n)}; }
LILY_INLINE __m256i pack_bytes(__m256i a, __m256i b) { return _mm256_permute4x64_epi64(_mm256_packus_epi16(a, b), 0xd8); }  // words below 256
LILY_INLINE void store_low_bytes(uint8_t* p, U a) {
  const __m256i low = _mm256_set1_epi32(255);
  __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(_mm256_and_si256(a.lo, low), _mm256_and_si256(a.hi, low)), 0xd8);
  _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(pack_bytes(words, words)));
}
LILY_INLINE void split_bytes(const uint8_t* p, uint8_t* even, uint8_t* odd) {
  const __m256i low = _mm256_set1_epi16(255);
  __m256i a = _mm256_loadu_si256((const __m256i*)p), b = _mm256_loadu_si256((const __m256i*)(p + 32));
  _mm256_storeu_si256((__m256i*)even, pack_bytes(_mm256_and_si256(a, low), _mm256_and_si256(b, low)));
  _mm256_storeu_si256((__m256i*)odd, pack_bytes(_mm256_srli_epi16(a, 8), _mm256_srli_epi16(b, 8)));
}
LILY_INLINE float reduce_add(V a) {
  __m256 b = _mm256_add_ps(a.lo, a.hi);
  __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
  c = _mm_add_ps(c, _mm_movehl_ps(c, c));
  return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
}
#elif defined(LILY_NEON)
struct V { float32x4_t a, b, c, d; };
struct U { uint32x4_t a, b, c, d; };
#define LILY_ONE(R, name, T, op) LILY_INLINE R name(T x) { return {op(x.a), op(x.b), op(x.c), op(x.d)}; }
#define LILY_TWO(T, name, op) LILY_INLINE T name(T x, T y) { return {op(x.a, y.a), op(x.b, y.b), op(x.c, y.c), op(x.d, y.d)}; }
// x86's choice where a value is NaN or both are zeros: the second one
LILY_INLINE float32x4_t larger_of(float32x4_t x, float32x4_t y) { return vbslq_f32(vcgtq_f32(x, y), x, y); }
LILY_INLINE float32x4_t smaller_of(float32x4_t x, float32x4_t y) { return vbslq_f32(vcltq_f32(x, y), x, y); }
LILY_INLINE uint32x4_t nearest_int(float32x4_t x) { return vreinterpretq_u32_s32(vcvtnq_s32_f32(x)); }
LILY_INLINE float32x4_t signed_float(uint32x4_t x) { return vcvtq_f32_s32(vreinterpretq_s32_u32(x)); }
LILY_INLINE uint32x4_t shift_right(uint32x4_t x, uint32x4_t n) { return vshlq_u32(x, vnegq_s32(vreinterpretq_s32_u32(n))); }
LILY_INLINE V splat(float x) { float32x4_t v = vdupq_n_f32(x); return {v, v, v, v}; }
LILY_INLINE V zero() { return splat(0); }
LILY_INLINE V load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}; }
LILY_INLINE void store(float* p, V x) { vst1q_f32(p, x.a); vst1q_f32(p + 4, x.b); vst1q_f32(p + 8, x.c); vst1q_f32(p + 12, x.d); }
LILY_TWO(V, add, vaddq_f32)
LILY_TWO(V, sub, vsubq_f32)
LILY_TWO(V, mul, vmulq_f32)
LILY_TWO(V, div, vdivq_f32)
LILY_TWO(V, max, larger_of)
LILY_TWO(V, min, smaller_of)
LILY_INLINE V fma(V x, V y, V z) { return {vfmaq_f32(z.a, x.a, y.a), vfmaq_f32(z.b, x.b, y.b), vfmaq_f32(z.c, x.c, y.c), vfmaq_f32(z.d, x.d, y.d)}; }
LILY_ONE(V, round_nearest, V, vrndnq_f32)
LILY_ONE(U, to_int, V, nearest_int)
LILY_ONE(V, to_float, U, signed_float)
LILY_INLINE uint32x4_t load_part(const void* p) { return vreinterpretq_u32_u8(vld1q_u8(static_cast<const uint8_t*>(p))); }
LILY_INLINE U loadu(const void* p) { const char* q = static_cast<const char*>(p); return {load_part(q), load_part(q + 16), load_part(q + 32), load_part(q + 48)}; }
LILY_INLINE U splatu(uint32_t x) { uint32x4_t v = vdupq_n_u32(x); return {v, v, v, v}; }
LILY_TWO(U, addu, vaddq_u32)
LILY_TWO(U, andu, vandq_u32)
LILY_TWO(U, oru, vorrq_u32)
template <int n> LILY_INLINE U shl(U x) { return {vshlq_n_u32(x.a, n), vshlq_n_u32(x.b, n), vshlq_n_u32(x.c, n), vshlq_n_u32(x.d, n)}; }
template <int n> LILY_INLINE U shr(U x) { return {vshrq_n_u32(x.a, n), vshrq_n_u32(x.b, n), vshrq_n_u32(x.c, n), vshrq_n_u32(x.d, n)}; }
LILY_TWO(U, shrv, shift_right)
LILY_ONE(U, bits, V, vreinterpretq_u32_f32)
LILY_ONE(V, from_bits, U, vreinterpretq_f32_u32)
LILY_INLINE float32x4_t permute_part(uint8x16x4_t table, uint32x4_t i) {  // byte k of a word is byte 4 i + k of the table
  uint32x4_t byte = vmlaq_u32(vdupq_n_u32(0x03020100), vandq_u32(i, vdupq_n_u32(15)), vdupq_n_u32(0x04040404));
  return vreinterpretq_f32_u8(vqtbl4q_u8(table, vreinterpretq_u8_u32(byte)));
}
LILY_INLINE V permute(V t, U i) {
  uint8x16x4_t table = {{vreinterpretq_u8_f32(t.a), vreinterpretq_u8_f32(t.b), vreinterpretq_u8_f32(t.c), vreinterpretq_u8_f32(t.d)}};
  return {permute_part(table, i.a), permute_part(table, i.b), permute_part(table, i.c), permute_part(table, i.d)};
}
LILY_INLINE U widen(uint16x8_t low, uint16x8_t high) {
  return {vmovl_u16(vget_low_u16(low)), vmovl_u16(vget_high_u16(low)), vmovl_u16(vget_low_u16(high)), vmovl_u16(vget_high_u16(high))};
}
LILY_INLINE uint16x8_t load_halves(const void* p) { return vreinterpretq_u16_u8(vld1q_u8(static_cast<const uint8_t*>(p))); }
LILY_INLINE U load_u8(const void* p) {
  uint8x16_t x = vld1q_u8(static_cast<const uint8_t*>(p));
  return widen(vmovl_u8(vget_low_u8(x)), vmovl_u8(vget_high_u8(x)));
}
LILY_INLINE U load_u16(const void* p) { return widen(load_halves(p), load_halves(static_cast<const char*>(p) + 16)); }
LILY_INLINE void store_u16(void* p, U x) {  // values below 65536
  uint8_t* q = static_cast<uint8_t*>(p);
  vst1q_u8(q, vreinterpretq_u8_u16(vcombine_u16(vmovn_u32(x.a), vmovn_u32(x.b))));
  vst1q_u8(q + 16, vreinterpretq_u8_u16(vcombine_u16(vmovn_u32(x.c), vmovn_u32(x.d))));
}
template <int n> LILY_INLINE uint32x4_t shift_signed(uint32x4_t x) { return vreinterpretq_u32_s32(vshrq_n_s32(vreinterpretq_s32_u32(x), n)); }
template <int n> LILY_INLINE U sar(U x) { return {shift_signed<n>(x.a), shift_signed<n>(x.b), shift_signed<n>(x.c), shift_signed<n>(x.d)}; }
LILY_INLINE void store_low_bytes(uint8_t* p, U x) {
  uint16x8_t low = vcombine_u16(vmovn_u32(x.a), vmovn_u32(x.b)), high = vcombine_u16(vmovn_u32(x.c), vmovn_u32(x.d));
  vst1q_u8(p, vcombine_u8(vmovn_u16(low), vmovn_u16(high)));
}
LILY_INLINE void split_bytes(const uint8_t* p, uint8_t* even, uint8_t* odd) {
  for (int i = 0; i < 2; i++) {
    uint8x16x2_t pairs = vld2q_u8(p + 32 * i);
    vst1q_u8(even + 16 * i, pairs.val[0]);
    vst1q_u8(odd + 16 * i, pairs.val[1]);
  }
}
LILY_INLINE U gather_u32(const void* p, U o) {
  uint32_t offset[16], r[16];
  std::memcpy(offset, &o, 64);
  for (int i = 0; i < 16; i++) r[i] = load_any<uint32_t>(static_cast<const char*>(p) + int32_t(offset[i]));
  return loadu(r);
}
LILY_INLINE float reduce_add(V x) {
  float32x4_t c = vaddq_f32(vaddq_f32(x.a, x.c), vaddq_f32(x.b, x.d));
  return vpadds_f32(vadd_f32(vget_low_f32(c), vget_high_f32(c)));
}
#undef LILY_ONE
#undef LILY_TWO
#else
struct V { float v[16]; };
struct U { uint32_t v[16]; };
#define LILY_EACH for (int i = 0; i < 16; i++)
LILY_INLINE V zero() { V r; LILY_EACH r.v[i] = 0; return r; }
LILY_INLINE V splat(float x) { V r; LILY_EACH r.v[i] = x; return r; }
LILY_INLINE V load(const float* p) { V r; std::memcpy(r.v, p, 64); return r; }
LILY_INLINE void store(float* p, V a) { std::memcpy(p, a.v, 64); }
LILY_INLINE V add(V a, V b) { LILY_EACH a.v[i] += b.v[i]; return a; }
LILY_INLINE V sub(V a, V b) { LILY_EACH a.v[i] -= b.v[i]; return a; }
LILY_INLINE V mul(V a, V b) { LILY_EACH a.v[i] *= b.v[i]; return a; }
LILY_INLINE V div(V a, V b) { LILY_EACH a.v[i] /= b.v[i]; return a; }
LILY_INLINE V max(V a, V b) { LILY_EACH a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return a; }
LILY_INLINE V min(V a, V b) { LILY_EACH a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i]; return a; }
LILY_INLINE V fma(V a, V b, V c) { LILY_EACH a.v[i] = a.v[i] * b.v[i] + c.v[i]; return a; }
LILY_INLINE V round_nearest(V a) { LILY_EACH a.v[i] = (a.v[i] + 12582912.0f) - 12582912.0f; return a; }  // |a| below 2^22
LILY_INLINE U to_int(V a) { U r; LILY_EACH r.v[i] = uint32_t(int32_t(a.v[i])); return r; }
LILY_INLINE V to_float(U a) { V r; LILY_EACH r.v[i] = float(int32_t(a.v[i])); return r; }
LILY_INLINE U loadu(const void* p) { U r; std::memcpy(r.v, p, 64); return r; }
LILY_INLINE U splatu(uint32_t x) { U r; LILY_EACH r.v[i] = x; return r; }
LILY_INLINE U addu(U a, U b) { LILY_EACH a.v[i] += b.v[i]; return a; }
LILY_INLINE U andu(U a, U b) { LILY_EACH a.v[i] &= b.v[i]; return a; }
LILY_INLINE U oru(U a, U b) { LILY_EACH a.v[i] |= b.v[i]; return a; }
template <int n> LILY_INLINE U shl(U a) { LILY_EACH a.v[i] <<= n; return a; }
template <int n> LILY_INLINE U shr(U a) { LILY_EACH a.v[i] >>= n; return a; }
LILY_INLINE U shrv(U a, U n) { LILY_EACH a.v[i] >>= n.v[i]; return a; }
LILY_INLINE U bits(V a) { U r; std::memcpy(r.v, a.v, 64); return r; }
LILY_INLINE V from_bits(U a) { V r; std::memcpy(r.v, a.v, 64); return r; }
LILY_INLINE V permute(V t, U x) { V r; LILY_EACH r.v[i] = t.v[x.v[i] & 15]; return r; }
LILY_INLINE U load_u8(const void* p) { U r; LILY_EACH r.v[i] = ((const uint8_t*)p)[i]; return r; }
LILY_INLINE U load_u16(const void* p) { U r; LILY_EACH r.v[i] = load_any<uint16_t>((const char*)p + 2 * i); return r; }
LILY_INLINE void store_u16(void* p, U a) { LILY_EACH { uint16_t h = uint16_t(a.v[i]); std::memcpy((char*)p + 2 * i, &h, 2); } }
LILY_INLINE U gather_u32(const void* p, U o) { U r; LILY_EACH r.v[i] = load_any<uint32_t>((const char*)p + int32_t(o.v[i])); return r; }
LILY_INLINE float reduce_add(V a) {
  float b[8], c[4];
  for (int i = 0; i < 8; i++) b[i] = a.v[i] + a.v[i + 8];
  for (int i = 0; i < 4; i++) c[i] = b[i] + b[i + 4];
  return (c[0] + c[2]) + (c[1] + c[3]);
}
#endif

LILY_INLINE float reduce_max(V a) {
#if defined(__AVX512F__) || defined(__AVX2__)
#if defined(__AVX512F__)
  __m256 b = _mm256_max_ps(_mm512_castps512_ps256(a.v), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a.v), 1)));
#else
  __m256 b = _mm256_max_ps(a.lo, a.hi);
#endif
  __m128 c = _mm_max_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
  c = _mm_max_ps(c, _mm_movehl_ps(c, c));
  return _mm_cvtss_f32(_mm_max_ss(c, _mm_movehdup_ps(c)));
#elif defined(LILY_NEON)
  return vmaxvq_f32(larger_of(larger_of(a.a, a.c), larger_of(a.b, a.d)));
#else
  float t[16], m;
  store(t, a);
  m = t[0];
  for (int i = 1; i < 16; i++) m = t[i] > m ? t[i] : m;
  return m;
#endif
}

// ---- activation storage ----
LILY_INLINE V load(const Bf16* p) { return from_bits(shl<16>(load_u16(p))); }
LILY_INLINE V load(const F32* p) { return load(&p->value); }
LILY_INLINE U bf16_bits(V a) {  // rounded to nearest even, in the upper half of each lane
#if defined(__AVX512F__)
  __m512i b = _mm512_castps_si512(a.v);
  __mmask16 odd = _mm512_test_epi32_mask(b, _mm512_set1_epi32(0x10000));
  __m512i up = _mm512_mask_add_epi32(_mm512_add_epi32(b, _mm512_set1_epi32(0x7fff)), odd, b, _mm512_set1_epi32(0x8000));
  return {_mm512_and_si512(up, _mm512_set1_epi32(int(0xffff0000u)))};
#else
  U b = bits(a);
  U odd = andu(shr<16>(b), splatu(1));
  return andu(addu(b, addu(odd, splatu(0x7fff))), splatu(0xffff0000u));
#endif
}
template <class Act> LILY_INLINE V round_act(V a);
template <> inline __attribute__((always_inline)) V round_act<Bf16>(V a) { return from_bits(bf16_bits(a)); }
template <> inline __attribute__((always_inline)) V round_act<F32>(V a) { return a; }
template <class Act> LILY_INLINE float round_act(float a);
template <> inline __attribute__((always_inline)) float round_act<Bf16>(float a) { return bf16_float(float_bf16(a)); }
template <> inline __attribute__((always_inline)) float round_act<F32>(float a) { return a; }
LILY_INLINE void store(Bf16* p, V a) { store_u16(p, shr<16>(bf16_bits(a))); }
LILY_INLINE void store(F32* p, V a) { store(&p->value, a); }
LILY_INLINE float load1(const Bf16* p) { return bf16_float(p->bits); }
LILY_INLINE float load1(const F32* p) { return p->value; }
LILY_INLINE void store1(Bf16* p, float a) { p->bits = float_bf16(a); }
LILY_INLINE void store1(F32* p, float a) { p->value = a; }

// Multiply-add of single floats with the same rounding as the vector form.
LILY_INLINE float fma1(float a, float b, float c) {
#if defined(__FMA__) || defined(LILY_NEON)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

// e^x within 2 ulp; 0 below -87.5 (no subnormals), inf above 88.8, NaN kept. Range reduction by ln 2 in two parts, degree-7 polynomial.
#if defined(__AVX2__) || defined(LILY_NEON)
LILY_INLINE
#else
static inline __attribute__((noinline))  // inlined at every use, its scalar loops dominate the build
#endif
V exp(V x) {
  V clamped = min(splat(89.0f), max(splat(-87.5f), x));
  V n = round_nearest(mul(clamped, splat(1.44269504f)));
  V r = fma(n, splat(-0.693359375f), clamped);
  r = fma(n, splat(2.12194440e-4f), r);
  V p = splat(1.0f / 5040);
  p = fma(p, r, splat(1.0f / 720));
  p = fma(p, r, splat(1.0f / 120));
  p = fma(p, r, splat(1.0f / 24));
  p = fma(p, r, splat(1.0f / 6));
  p = fma(p, r, splat(0.5f));
  p = fma(p, r, splat(1.0f));
  p = fma(p, r, splat(1.0f));
#if defined(__AVX512F__)
  // lanes below the clamp are zero; what is no number stays none
  return {_mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x.v, _mm512_set1_ps(-87.5f), _CMP_NLT_UQ), p.v, n.v)};
#else
  // 2^n in two factors, so that n = 128 overflows to infinity and not to garbage
  U half = to_int(round_nearest(mul(n, splat(0.5f))));
  U rest = to_int(sub(n, to_float(half)));
  V a = from_bits(shl<23>(addu(half, splatu(127)))), b = from_bits(shl<23>(addu(rest, splatu(127))));
  V y = mul(mul(p, a), b);
  // lanes below the clamp are zero
  V below = sub(x, splat(-87.5f));
  U sign = bits(min(below, zero()));
  U keep = addu(splatu(0xffffffffu), shr<31>(sign));  // all ones when x >= -87.5, else 0
  return from_bits(andu(bits(y), keep));
#endif
}
LILY_INLINE float first(V a) { float t[16]; store(t, a); return t[0]; }
LILY_INLINE float exp1(float x) { return first(exp(splat(x))); }
LILY_INLINE V sigmoid(V x) { return div(splat(1), add(splat(1), exp(sub(zero(), x)))); }
LILY_INLINE V silu(V x) { return div(x, add(splat(1), exp(sub(zero(), x)))); }
LILY_INLINE float sigmoid1(float x) { return 1.0f / (1.0f + exp1(-x)); }

// y[r] = reduce_add(acc[r]); four at a time share the folding.
template <uint32_t R> LILY_INLINE void reduce_rows(const V* acc, float* y) {
#if defined(__AVX512F__)
  if constexpr (R == 4) {
    __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(acc[0].v, acc[1].v, 0x44), _mm512_shuffle_f32x4(acc[0].v, acc[1].v, 0xee));
    __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(acc[2].v, acc[3].v, 0x44), _mm512_shuffle_f32x4(acc[2].v, acc[3].v, 0xee));
    __m512 four = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));  // row r in 128-bit part r
    four = _mm512_add_ps(four, _mm512_permute_ps(four, 0x4e));
    four = _mm512_add_ps(four, _mm512_permute_ps(four, 0xb1));
    const __m512i firsts = _mm512_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12);
    _mm_storeu_ps(y, _mm512_castps512_ps128(_mm512_permutexvar_ps(firsts, four)));
    return;
  }
#endif
  for (uint32_t r = 0; r < R; r++) y[r] = reduce_add(acc[r]);
}

}  // namespace lily::cpu::LILY_CPU_NS
