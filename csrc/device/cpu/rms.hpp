// RMS norm as every kernel computes it, so that a norm folded into its consumer gives the bits of the norm on its own:
// sums of squares of 16 elements, added in ascending order from the first; x = round((h * r) * weight).
#pragma once
#include "device/cpu/simd.hpp"

namespace lily::cpu::LILY_CPU_NS {

// Partial sum of squares of h[0..15].
LILY_INLINE float ssq_block(const float* h) {
  V v = load(h);
  return reduce_add(mul(v, v));
}

LILY_INLINE float rms_from_total(float total, uint32_t H, float eps) { return 1.0f / __builtin_sqrtf(total / float(H) + eps); }

// r = 1 / sqrt(mean square + eps) from the H/16 partials of a row.
LILY_INLINE float rms_scale(const float* ssq, uint32_t H, float eps) {
  float total = ssq[0];
  for (uint32_t i = 1; i < H / 16; i++) total += ssq[i];
  return rms_from_total(total, H, eps);
}

template <class Act> LILY_INLINE V rms_apply(V h, float r, V w) { return round_act<Act>(mul(mul(h, splat(r)), w)); }

}  // namespace lily::cpu::LILY_CPU_NS
