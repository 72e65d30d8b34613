// What the sampling kernels share. There is no double on a GPU: weights exp((y - M)/T) are summed as 64-bit integers in units of 2^-44,
// so that sums have no order, thresholds are exact and every device draws the same token.
#ifndef LILY_SAMPLE_H
#define LILY_SAMPLE_H
#include "reduce.h"

#define LOWEST_DIGIT 4u  // first radix digit of -FLT_MAX; only -inf lies below
#define SAMPLE_SEGMENT 512u   // ids behind one sum of sample_mass when it serves a plain draw

inline uint first_digit(float v) { return order_key(v) >> 21; }

// What the settings ask for; all three kernels decide by it.
struct SamplePlan {
  bool greedy, top_p;
  uint top_k, alternatives;
};
inline SamplePlan sample_plan(device const LilySample& s) {
  SamplePlan p;
  p.greedy = (s.flags & LILY_SAMPLE_GREEDY) != 0u || !(s.temperature > 0.0f);
  p.top_p = !p.greedy && s.top_p < 1.0f;
  p.top_k = p.greedy ? 0u : s.top_k;
  p.alternatives = (s.flags & LILY_SAMPLE_LOGPROBS) != 0u ? min(s.n_logprobs, uint(LILY_MAX_LOGPROBS)) : 0u;
  return p;
}
inline bool needs_histogram(SamplePlan p) { return p.top_k != 0u || p.alternatives != 0u; }
inline bool needs_mass(SamplePlan p) { return p.top_p && p.top_k == 0u; }
inline bool needs_segments(SamplePlan p) { return !p.greedy && !p.top_p && p.top_k == 0u; }

// The largest of the blocks' maxima and its id (the lowest): all threads read the few blocks alike.
struct SampleBest {
  float highest;
  uint id;
};
inline SampleBest sample_best(device const float* block, uint blocks) {
  SampleBest best = {minus_infinity(), 0xffffffffu};
  for (uint b = 0; b < blocks; b++) {
    float m = block[4u * b];
    uint id = as_type<uint>(block[4u * b + 1u]);
    if (m > best.highest || (best.id == 0xffffffffu && best.highest == minus_infinity())) best.highest = m, best.id = id;
  }
  return best;
}

// 1 for the highest, 0 below min_p.
inline float sample_weight(float y, float highest, float temperature, float min_p) {
  float w = metal::exp((y - highest) / temperature);
  return w >= min_p ? w : 0.0f;
}

// w < 2^18 in units of 2^-44, rounded down.
inline ulong fixed_point(float w) {
  float scaled = w * 65536.0f;
  uint whole = uint(scaled);
  uint part = uint((scaled - float(whole)) * 268435456.0f);
  return (ulong(whole) << 28) + ulong(part);
}

// total * fraction / 2^32, rounded down.
inline ulong share_of(ulong total, uint fraction) {
  return (total >> 32) * fraction + (((total & 0xffffffffu) * fraction) >> 32);
}

// Philox4x32-10 (Salmon et al., 2011), first word: a draw depends on seed and position alone.
inline uint philox(uint key0, uint key1, uint counter) {
  uint x = counter, y = 0u, z = 0u, w = 0u;
  for (uint i = 0; i < 10u; i++) {
    uint a_high = mulhi(0xD2511F53u, x), a_low = 0xD2511F53u * x, b_high = mulhi(0xCD9E8D57u, z), b_low = 0xCD9E8D57u * z;
    x = b_high ^ y ^ key0;
    y = b_low;
    z = a_high ^ w ^ key1;
    w = a_low;
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return x;
}

// Over a threadgroup of 32 simdgroups: every thread gets the result. scratch: 32 values; a barrier before it is used again.
inline float threadgroup_max(float x, uint simd, uint lane, threadgroup float* scratch) {
  float m = simd_max(x);
  if (lane == 0u) scratch[simd] = m;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return simd_max(scratch[lane]);
}
inline float threadgroup_sum(float x, uint simd, uint lane, threadgroup float* scratch) {
  float sum = lane_sum(x);
  if (lane == 0u) scratch[simd] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return lane_sum(scratch[lane]);
}
inline uint threadgroup_min(uint x, uint simd, uint lane, threadgroup uint* scratch) {
  uint m = simd_min(x);
  if (lane == 0u) scratch[simd] = m;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return simd_min(scratch[lane]);
}

#endif
