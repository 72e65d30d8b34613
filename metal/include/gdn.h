// Gated DeltaNet: the arithmetic that gdn_step and the row kernels share, so that one row through either gives the same bits.
// Sums over Dk have one order (contract). With N = 1, 2, 4 or 8, the smallest for which 32 N >= Dk, slot l of 32 holds dk = l N .. l N + N - 1:
//   a slot's products are added by fma, ascending from zero; slots past Dk are zero; the 32 slots are added as lane_sum adds lanes.
// A simdgroup that owns columns keeps slot l in lane l; a thread that owns a column adds eight slots of its own with slot_tree and
// joins the four eighths-of-32 as (0+1) + (2+3): the same tree.
#ifndef LILY_GDN_H
#define LILY_GDN_H
#include "reduce.h"

// silu(sum of the four taps, oldest first); x0 is the oldest row.
inline float conv_silu(float w0, float w1, float w2, float w3, float x0, float x1, float x2, float x3) {
  return silu(metal::fma(w3, x3, metal::fma(w2, x2, metal::fma(w1, x1, w0 * x0))));
}

// The products of one slot.
template <uint N> inline float slot_dot(thread const float* a, thread const float* b) {
  float sum = 0.0f;
  LILY_UNROLL for (uint j = 0; j < N; j++) sum = metal::fma(a[j], b[j], sum);
  return sum;
}
inline float slot_tree(float a, float b, float c, float d, float e, float f, float g, float h) { return ((a + b) + (c + d)) + ((e + f) + (g + h)); }
// A dot product over Dk by a simdgroup that holds slot l in lane l.
template <uint N> inline float dk_dot(thread const float* a, thread const float* b) { return lane_sum(slot_dot<N>(a, b)); }

// A query or key head in slots: x = x / sqrt(sum x^2 + 1e-6) * scale. The 1e-6 belongs to the model and is added to the sum, not to the mean.
// scale: query_scale(Dk) for a query, 1 for a key.
template <uint N> inline void normalise_head(thread float* x, float scale) {
  float r = 1.0f / metal::sqrt(dk_dot<N>(x, x) + 1e-6f);
  LILY_UNROLL for (uint j = 0; j < N; j++) x[j] = x[j] * r * scale;
}
inline float query_scale(uint Dk) { return 1.0f / metal::sqrt(float(Dk)); }

// log(1 + t) for t in [0, 1], within 2 ulp: 2 atanh(s), s = t/(2+t) at most 1/3.
inline float log1p_unit(float t) {
  float s = t / (2.0f + t), z = s * s, p = 1.0f / 15.0f;
  p = metal::fma(p, z, 1.0f / 13.0f);
  p = metal::fma(p, z, 1.0f / 11.0f);
  p = metal::fma(p, z, 1.0f / 9.0f);
  p = metal::fma(p, z, 1.0f / 7.0f);
  p = metal::fma(p, z, 1.0f / 5.0f);
  p = metal::fma(p, z, 1.0f / 3.0f);
  float twice = s + s;
  return metal::fma(z * p, twice, twice);
}
inline float softplus(float x) { return metal::max(x, 0.0f) + log1p_unit(metal::exp(-metal::fabs(x))); }

// The gates of a value head: g = exp(A softplus(a + dt_bias)); beta = sigmoid(b).
inline float decay_gate(float a, float A, float dt_bias) { return metal::exp(A * softplus(a + dt_bias)); }
inline float beta_gate(float b) { return sigmoid(b); }

// One token, one column: u = S k, p = S q of the old state; then d, the new state and the output.
inline float delta(float v, float u, float g, float beta) { return beta * metal::fma(-g, u, v); }
inline float updated(float S, float g, float d, float k) { return metal::fma(d, k, g * S); }
inline float scan_output(float p, float g, float d, float kq) { return metal::fma(d, kq, g * p); }

// x before rounding, with r = rms_from_total(square_sum(o, Dv), Dv, eps).
inline float gated_norm(float o, float r, float weight, float z) { return ((o * r) * weight) * silu(z); }

#endif
