// Choosing by value without a sort: an order-preserving key, its first digit, and radix selection over a list of candidates.
#pragma once
#include "args.h"
#include "device/cpu/kernel.hpp"
#include "device/cpu/simd.hpp"

namespace lily::cpu::LILY_CPU_NS {

constexpr float negative_infinity = -__builtin_inff();
constexpr uint32_t lowest_digit = 4;  // of -FLT_MAX; only -inf lies below

// Larger float, larger key. Values hold no NaN and no -0.
LILY_INLINE uint32_t order_key(float v) {
  uint32_t b = float_bits(v);
  return b ^ (uint32_t(int32_t(b) >> 31) | 0x80000000u);
}
LILY_INLINE uint32_t first_digit(float v) { return order_key(v) >> 21; }
// The smallest value of a first digit.
LILY_INLINE float digit_floor(uint32_t digit) {
  uint32_t key = digit << 21;
  return bits_float(key >> 31 ? key ^ 0x80000000u : ~key);
}

// Bit i: a[i] >= b[i].
LILY_INLINE uint32_t lanes_at_least(V a, V b) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ);
#elif defined(__AVX2__)
  return uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(a.lo, b.lo, _CMP_GE_OQ))) | uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(a.hi, b.hi, _CMP_GE_OQ))) << 8;
#elif defined(LILY_NEON)
  const uint32x4_t one = {1, 2, 4, 8};
  uint32x4_t low = vorrq_u32(vandq_u32(vcgeq_f32(a.a, b.a), one), vandq_u32(vcgeq_f32(a.b, b.b), vshlq_n_u32(one, 4)));
  uint32x4_t high = vorrq_u32(vandq_u32(vcgeq_f32(a.c, b.c), vshlq_n_u32(one, 8)), vandq_u32(vcgeq_f32(a.d, b.d), vshlq_n_u32(one, 12)));
  return vaddvq_u32(vorrq_u32(low, high));
#else
  uint32_t m = 0;
  for (int i = 0; i < 16; i++) m |= uint32_t(a.v[i] >= b.v[i]) << i;
  return m;
#endif
}

// Sixteen values from p, of which only `n` exist; the others read as `fill`.
LILY_INLINE V load_some(const float* p, uint32_t n, float fill) {
  if (n >= 16) return load(p);
  float t[16];
  for (uint32_t i = 0; i < 16; i++) t[i] = i < n ? p[i] : fill;
  return load(t);
}
LILY_INLINE void store_some(float* p, V v, uint32_t n) {
  if (n >= 16) return store(p, v);
  float t[16];
  store(t, v);
  for (uint32_t i = 0; i < n; i++) p[i] = t[i];
}

// What a logit weighs after temperature: exp((y - highest) / temperature), 1 for the highest.
struct Weigh {
  float highest, temperature;
  __attribute__((always_inline)) V operator()(V y) const { return exp(div(sub(y, splat(highest)), splat(temperature))); }
};

// Candidates in ascending id order; ids null: the position is the id.
struct Candidates {
  float* values;
  uint32_t* ids;
  uint32_t count;
};

// Where a selection ends: everything above `key`, and the first `ties` candidates at it.
struct Cut {
  uint32_t key, ties;
};

// Appends the ids [begin, end) of y with y >= floor.
static void gather(const float* y, uint32_t vocab, float floor, Candidates& out) {
  out.count = 0;
  for (uint32_t i = 0; i < vocab; i += 16) {
    uint32_t n = vocab - i;
    uint32_t lanes = lanes_at_least(load_some(y + i, n, negative_infinity), splat(floor));
    for (; lanes; lanes &= lanes - 1) {
      uint32_t id = i + uint32_t(__builtin_ctz(lanes));
      out.values[out.count] = y[id];
      out.ids[out.count++] = id;
    }
  }
}

// One radix digit: shift 21, 10, 0 with 11, 11, 10 bits. A candidate is still in play if the bits above equal the prefix.
struct Digit {
  uint32_t shift, bits;
  __attribute__((always_inline)) bool in_play(uint32_t key, uint32_t prefix) const { return shift + bits == 32 || (key ^ prefix) >> (shift + bits) == 0; }
  __attribute__((always_inline)) uint32_t of(uint32_t key) const { return key >> shift & ((1u << bits) - 1); }
};
constexpr Digit kDigits[3] = {{21, 11}, {10, 11}, {0, 10}};

// The n largest candidates, ties to the lower id; all of them if there are fewer.
static Cut select_count(const Candidates& c, uint32_t n) {
  if (n >= c.count) return {0, c.count};
  uint32_t prefix = 0, left = n;
  for (const Digit& d : kDigits) {
    uint32_t histogram[LILY_HIST_BINS] = {};
    for (uint32_t i = 0; i < c.count; i++) {
      uint32_t key = order_key(c.values[i]);
      if (d.in_play(key, prefix)) histogram[d.of(key)]++;
    }
    uint32_t bin = (1u << d.bits) - 1;
    for (; bin > 0 && histogram[bin] < left; bin--) left -= histogram[bin];
    prefix |= bin << d.shift;
  }
  return {prefix, left};
}

// The smallest set of largest candidates whose weights reach `mass`, ties to the lower id, the crossing one included; never empty.
static Cut select_mass(const Candidates& c, const Weigh& weigh, double mass) {
  uint32_t prefix = 0;
  double left = mass;
  float weights[64];
  for (const Digit& d : kDigits) {
    double histogram[LILY_HIST_BINS] = {};
    uint32_t lowest = LILY_HIST_BINS;  // digit in play: where a rounding deficit ends
    for (uint32_t i = 0; i < c.count; i += 64) {
      uint32_t n = c.count - i < 64 ? c.count - i : 64;
      for (uint32_t k = 0; k < n; k += 16) store(weights + k, weigh(load_some(c.values + i + k, n - k, negative_infinity)));
      for (uint32_t k = 0; k < n; k++) {
        uint32_t key = order_key(c.values[i + k]);
        if (!d.in_play(key, prefix)) continue;
        uint32_t bin = d.of(key);
        histogram[bin] += double(weights[k]);
        if (bin < lowest) lowest = bin;
      }
    }
    uint32_t bin = (1u << d.bits) - 1;
    for (; bin > lowest && !(histogram[bin] > 0 && histogram[bin] >= left); bin--) left -= histogram[bin];
    prefix |= bin << d.shift;
  }
  float value = bits_float(prefix >> 31 ? prefix ^ 0x80000000u : ~prefix);
  double weight = double(first(weigh(splat(value))));
  uint32_t ties = 1;
  while (ties < c.count && ties * weight < left) ties++;
  return {prefix, ties};
}

// Keeps what a cut keeps, in order; `out` may be the list itself.
static void keep(const Candidates& c, Cut cut, Candidates& out) {
  uint32_t n = 0, ties = 0;
  for (uint32_t i = 0; i < c.count; i++) {
    uint32_t key = order_key(c.values[i]);
    if (key < cut.key || (key == cut.key && ties++ >= cut.ties)) continue;
    float value = c.values[i];
    uint32_t id = c.ids[i];
    out.values[n] = value;
    out.ids[n++] = id;
  }
  out.count = n;
}

}  // namespace lily::cpu::LILY_CPU_NS
