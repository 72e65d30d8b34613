// Activations of decode as fixed point, for products with codes of 4 bits in integers: exact sums at the rate of byte products.
// A group of 64 values shares a unit, 2^(E-21) with 2^E <= the largest magnitude < 2^(E+1), and a value is a whole number of units, |X| <= 255 * 2^14. A bf16 value has
// eight significant bits, so it is one exactly if it is 0 or at least 2^(E-14); a smaller one is off by at most half a unit, 2^-22 of the largest one.
// Below 2^-100 the unit no longer shrinks.
// X = (d2 * 256 + d1) * 256 + d0 with signed bytes. Codes times digits, summed over eight pairs a lane, stay below 2^29: nothing is rounded before the
// conversion to fp32, which rounds once. The chain of fp32 multiply-adds that it stands for rounds eight times.
#pragma once
#include "device/cpu/weight.hpp"

#if defined(__AVX2__) || defined(__AVX512F__) || defined(LILY_NEON)
#define LILY_FIXED_POINT
#endif

namespace lily::cpu::LILY_CPU_NS {

// Of 128 values: digits 2, 1, 0 of the even and of the odd ones, 64 bytes each; byte b of a vector belongs to value 2b or 2b+1.
constexpr uint32_t kDigitBytes = 6 * 64;

// The vector in that form, and the units: 16 lanes for 128 values, the first group's in lanes 0-7.
struct FixedPoint {
  const uint8_t* digits = nullptr;
  const float* units = nullptr;
};

constexpr uint32_t fixed_point_floats(uint32_t padded) { return padded / 2 * 3 + padded / 8; }

#if defined(LILY_FIXED_POINT)
// The digits of 64 values in their order, digit 2 first; returns the unit.
LILY_INLINE float digits_of_group(const float* x, uint8_t* digit2, uint8_t* digit1, uint8_t* digit0) {
  V most = zero();
  for (uint32_t i = 0; i < 64; i += 16) most = max(from_bits(andu(bits(load(x + i)), splatu(0x7fffffff))), most);
  uint32_t exponent = float_bits(reduce_max(most)) >> 23;
  if (exponent < 27) exponent = 27;  // 2^-100: both powers of two below stay normal numbers
  const V scale = from_bits(splatu((127 + 21 + 127 - exponent) << 23));
  for (uint32_t i = 0; i < 64; i += 16) {
    const U d0 = to_int(mul(load(x + i), scale)), d1 = sar<8>(addu(d0, splatu(128))), d2 = sar<8>(addu(d1, splatu(128)));
    store_low_bytes(digit0 + i, d0);
    store_low_bytes(digit1 + i, d1);
    store_low_bytes(digit2 + i, d2);
  }
  return bits_float((exponent - 21) << 23);
}

// `padded` values, a multiple of 128, in `scratch` of fixed_point_floats(padded).
static FixedPoint fixed_point(const float* x, uint32_t padded, float* scratch) {
  uint8_t* natural = reinterpret_cast<uint8_t*>(scratch);
  uint8_t* digits = natural + 3 * padded;
  float* units = reinterpret_cast<float*>(digits + 3 * padded);
  for (uint32_t i = 0; i < padded; i += 64) {
    const float unit = digits_of_group(x + i, natural + i, natural + padded + i, natural + 2 * padded + i);
    for (uint32_t lane = 0; lane < 8; lane++) units[i / 8 + lane] = unit;
  }
  for (uint32_t i = 0; i < padded; i += 64)
    for (uint32_t d = 0; d < 3; d++) {
      uint8_t* even = digits + i / 128 * kDigitBytes + d * 128 + i % 128 / 2;
      split_bytes(natural + d * padded + i, even, even + 64);
    }
  return {digits, units};
}

// Whether the processor multiplies bytes and adds them up in one instruction; it makes no difference to any bit.
#if defined(__AVX512F__)
static bool byte_products() {
  static const bool has = __builtin_cpu_supports("avx512vnni");
  return has;
}
#else
constexpr bool byte_products() { return false; }
#endif

// sum + a.x + b.y, lane by lane four bytes at a time: a and b of 0..15, x and y signed.
#if defined(__AVX512F__)
template <bool vnni> LILY_INLINE U pair_dot(U sum, U a, U x, U b, U y) {
  if constexpr (vnni) {  // spelled out: these objects are compiled for processors without it too
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum.v) : "v"(a.v), "vm"(x.v));
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum.v) : "v"(b.v), "vm"(y.v));
    return sum;
  }
  const __m512i pairs = _mm512_add_epi16(_mm512_maddubs_epi16(a.v, x.v), _mm512_maddubs_epi16(b.v, y.v));
  return {_mm512_add_epi32(sum.v, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))};
}
#elif defined(__AVX2__)
LILY_INLINE __m256i pair_dot_half(__m256i sum, __m256i a, __m256i x, __m256i b, __m256i y) {
  const __m256i pairs = _mm256_add_epi16(_mm256_maddubs_epi16(a, x), _mm256_maddubs_epi16(b, y));
  return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
template <bool> LILY_INLINE U pair_dot(U sum, U a, U x, U b, U y) { return {pair_dot_half(sum.lo, a.lo, x.lo, b.lo, y.lo), pair_dot_half(sum.hi, a.hi, x.hi, b.hi, y.hi)}; }
#else
LILY_INLINE uint32x4_t pair_dot_part(uint32x4_t sum, uint32x4_t a, uint32x4_t x, uint32x4_t b, uint32x4_t y) {
  const int8x16_t as = vreinterpretq_s8_u32(a), xs = vreinterpretq_s8_u32(x), bs = vreinterpretq_s8_u32(b), ys = vreinterpretq_s8_u32(y);
  const int16x8_t low = vmlal_s8(vmull_s8(vget_low_s8(as), vget_low_s8(xs)), vget_low_s8(bs), vget_low_s8(ys));
  const int16x8_t high = vmlal_s8(vmull_s8(vget_high_s8(as), vget_high_s8(xs)), vget_high_s8(bs), vget_high_s8(ys));
  return vreinterpretq_u32_s32(vpadalq_s16(vreinterpretq_s32_u32(sum), vpaddq_s16(low, high)));
}
template <bool> LILY_INLINE U pair_dot(U sum, U a, U x, U b, U y) {
  return {pair_dot_part(sum.a, a.a, x.a, b.a, y.a), pair_dot_part(sum.b, a.b, x.b, b.b, y.b), pair_dot_part(sum.c, a.c, x.c, b.c, y.c), pair_dot_part(sum.d, a.d, x.d, b.d, y.d)};
}
#endif

// `depth` steps of 128 codes of `side` rows, c[step * side + row], times their values, in units of their groups: lanes 0-7 the first one's, 8-15 the second
// one's. Short chains side by side: what waits for its operands takes the place of what could run.
template <bool vnni, uint32_t depth, uint32_t side> LILY_INLINE void fixed_dots(const U* codes, const uint8_t* digits, V* out) {
  constexpr uint32_t n = depth * side;
  U low[n], high[n], sum[n];
  LILY_UNROLL for (uint32_t i = 0; i < n; i++) low[i] = andu(codes[i], splatu(0x0f0f0f0f)), high[i] = andu(shr<4>(codes[i]), splatu(0x0f0f0f0f));
  LILY_UNROLL for (uint32_t d = 0; d < 3; d++) LILY_UNROLL for (uint32_t i = 0; i < n; i++) {
      const uint8_t* at = digits + i / side * kDigitBytes + 128 * d;
      sum[i] = pair_dot<vnni>(d ? shl<8>(sum[i]) : splatu(0), low[i], loadu(at), high[i], loadu(at + 64));
    }
  LILY_UNROLL for (uint32_t i = 0; i < n; i++) out[i] = to_float(sum[i]);
}
#endif

}  // namespace lily::cpu::LILY_CPU_NS
