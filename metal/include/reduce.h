// Sums in the order of the contract. Whatever is summed twice, by a fused kernel and by its twin, is summed through these.
// All are collectives: the 32 lanes of a simdgroup call them together.
#ifndef LILY_REDUCE_H
#define LILY_REDUCE_H
#include "lily.h"

// Sum over the lanes as a tree of neighbours: ((0+1)+(2+3))+((4+5)+(6+7)) and so on; every lane gets the total.
// simd_sum leaves its order open, so two kernels, or two devices, could differ.
inline float lane_sum(float x) {
  x += simd_shuffle_xor(x, ushort(1));
  x += simd_shuffle_xor(x, ushort(2));
  x += simd_shuffle_xor(x, ushort(4));
  x += simd_shuffle_xor(x, ushort(8));
  return x + simd_shuffle_xor(x, ushort(16));
}

// The sums of four values in the order of lane_sum, for six shuffles in place of twenty: lane l gets the total of value l % 4.
// fold_quad is its first half: the sum over the four lanes of a neighbourhood.
inline float fold_quad(float a, float b, float c, float d, uint lane) {
  bool odd = (lane & 1u) != 0u, high = (lane & 2u) != 0u;
  float ab = (odd ? b : a) + simd_shuffle_xor(odd ? a : b, ushort(1));
  float cd = (odd ? d : c) + simd_shuffle_xor(odd ? c : d, ushort(1));
  return (high ? cd : ab) + simd_shuffle_xor(high ? ab : cd, ushort(2));
}
inline float sum_quad(float a, float b, float c, float d, uint lane) {
  float x = fold_quad(a, b, c, d, lane);
  x += simd_shuffle_xor(x, ushort(4));
  x += simd_shuffle_xor(x, ushort(8));
  return x + simd_shuffle_xor(x, ushort(16));
}

// The partial sum of squares behind a norm: 16 lanes hold 16 elements, squares are folded in halves (i + i^8, then 4, 2, 1).
// Both halves of the simdgroup work; lane 16 i holds the partial of its half.
inline float ssq_fold(float h) {
  float x = h * h;
  x += simd_shuffle_xor(x, ushort(8));
  x += simd_shuffle_xor(x, ushort(4));
  x += simd_shuffle_xor(x, ushort(2));
  return x + simd_shuffle_xor(x, ushort(1));
}

// The total of the H/16 partials of a row: lane l adds partials l, l+32, .. in order, then lane_sum. P points to device or threadgroup memory.
template <class P> inline float ssq_total(P partials, uint H, uint lane) {
  uint n = H / LILY_SSQ_BLOCK;
  float sum = lane < n ? partials[lane] : 0.0f;
  for (uint i = lane + 32u; i < n; i += 32u) sum += partials[i];
  return lane_sum(sum);
}

// Sum of squares of n values by one simdgroup: lane l takes l, l+32, .. in order by fma from zero, then lane_sum. For norms of heads.
template <class P> inline float square_sum(P x, uint n, uint lane) {
  float sum = 0.0f;
  for (uint i = lane; i < n; i += 32u) sum = metal::fma(float(x[i]), float(x[i]), sum);
  return lane_sum(sum);
}

inline float rms_from_total(float total, uint H, float eps) { return 1.0f / metal::sqrt(total / float(H) + eps); }
// x of a norm before rounding.
inline float rms_apply(float h, float r, float weight) { return (h * r) * weight; }

#endif
