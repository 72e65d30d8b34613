// Elementwise pieces of Gated DeltaNet that the fused decode kernel and the row kernels have in common, and rows of the state as vectors.
#pragma once
#include "args.h"
#include "device/cpu/simd.hpp"

namespace lily::cpu::LILY_CPU_NS {

constexpr uint32_t kMaxHeadDim = 256;  // of Dk everywhere, of Dv in gdn_step

// N vectors side by side: 16 N columns of the state that stay in registers while dk runs.
template <int N> struct Columns { V v; Columns<N - 1> rest; };
template <> struct Columns<1> { V v; };

#if defined(__AVX512F__)
constexpr int kStateColumns = 4;
#elif defined(__AVX2__) || defined(LILY_NEON)
constexpr int kStateColumns = 2;
#else
constexpr int kStateColumns = 1;
#endif

template <int N> LILY_INLINE Columns<N> zero_columns() {
  if constexpr (N == 1) return {zero()};
  else return {zero(), zero_columns<N - 1>()};
}
template <int N> LILY_INLINE Columns<N> load_columns(const float* p) {
  if constexpr (N == 1) return {load(p)};
  else return {load(p), load_columns<N - 1>(p + 16)};
}
template <int N> LILY_INLINE void store_columns(float* p, const Columns<N>& a) {
  store(p, a.v);
  if constexpr (N > 1) store_columns<N - 1>(p + 16, a.rest);
}
template <int N> LILY_INLINE Columns<N> scaled(const Columns<N>& a, V s) {
  if constexpr (N == 1) return {mul(a.v, s)};
  else return {mul(a.v, s), scaled<N - 1>(a.rest, s)};
}
template <int N> LILY_INLINE Columns<N> fma_columns(const Columns<N>& a, V s, const Columns<N>& c) {  // a*s + c
  if constexpr (N == 1) return {fma(a.v, s, c.v)};
  else return {fma(a.v, s, c.v), fma_columns<N - 1>(a.rest, s, c.rest)};
}

// d = beta * (v - g u)
template <int N> LILY_INLINE Columns<N> delta_columns(const Columns<N>& u, V g, V beta, const Columns<N>& v) {
  if constexpr (N == 1) return {mul(beta, sub(v.v, mul(g, u.v)))};
  else return {mul(beta, sub(v.v, mul(g, u.v))), delta_columns<N - 1>(u.rest, g, beta, v.rest)};
}

// silu(sum of the four taps, oldest first); x0 is the oldest row.
LILY_INLINE V conv_silu(V w0, V w1, V w2, V w3, V x0, V x1, V x2, V x3) {
  return silu(fma(w3, x3, fma(w2, x2, fma(w1, x1, mul(w0, x0)))));
}

// Dot product: lane i sums the elements i, i+16, .. in order, then the lanes are added.
LILY_INLINE float dot(const float* a, const float* b, uint32_t n) {
  V sum = mul(load(a), load(b));
  for (uint32_t i = 16; i < n; i += 16) sum = fma(load(a + i), load(b + i), sum);
  return reduce_add(sum);
}

// The 1e-6 belongs to the model and is added to the sum, not to the mean.
LILY_INLINE float inverse_norm(const float* x, uint32_t n) { return 1.0f / __builtin_sqrtf(dot(x, x, n) + 1e-6f); }
LILY_INLINE float query_scale(uint32_t Dk) { return 1.0f / __builtin_sqrtf(float(Dk)); }

LILY_INLINE void normalise_key(float* k, uint32_t Dk) {
  V r = splat(inverse_norm(k, Dk));
  for (uint32_t i = 0; i < Dk; i += 16) store(k + i, mul(load(k + i), r));
}
LILY_INLINE void normalise_query(float* q, uint32_t Dk) {
  V r = splat(inverse_norm(q, Dk)), scale = splat(query_scale(Dk));
  for (uint32_t i = 0; i < Dk; i += 16) store(q + i, mul(mul(load(q + i), r), scale));
}

// log(1 + t) for t in [0, 1], within 2 ulp: 2 atanh(s), s = t/(2+t) at most 1/3.
LILY_INLINE V log1p_unit(V t) {
  V s = div(t, add(splat(2), t)), z = mul(s, s);
  V p = splat(1.0f / 15);
  p = fma(p, z, splat(1.0f / 13));
  p = fma(p, z, splat(1.0f / 11));
  p = fma(p, z, splat(1.0f / 9));
  p = fma(p, z, splat(1.0f / 7));
  p = fma(p, z, splat(1.0f / 5));
  p = fma(p, z, splat(1.0f / 3));
  V twice = add(s, s);
  return fma(mul(z, p), twice, twice);
}
// log(1 + e^x) = max(x, 0) + log(1 + e^-|x|)
LILY_INLINE V softplus(V x) {
  V negative_abs = from_bits(oru(bits(x), splatu(0x80000000u)));
  return add(max(zero(), x), log1p_unit(exp(negative_abs)));
}

// Sixteen heads of gates: g = exp(A softplus(a + dt_bias)), beta = sigmoid(b).
struct Gates {
  float a[16], b[16], A[16], dt_bias[16];  // in
  float g[16], beta[16];                   // out
};
LILY_OUTLINE void run_gates(Gates& x) {
  store(x.g, exp(mul(load(x.A), softplus(add(load(x.a), load(x.dt_bias))))));
  store(x.beta, sigmoid(load(x.b)));
}

// x = round((o * r * weight) * silu(z)), r = 1/sqrt(mean(o^2) + eps), over the Dv values of a head.
template <class Act> LILY_OUTLINE void gated_norm(const float* o, const float* z, const float* weight, uint32_t Dv, float eps, Act* x) {
  V r = splat(1.0f / __builtin_sqrtf(dot(o, o, Dv) / float(Dv) + eps));
  for (uint32_t i = 0; i < Dv; i += 16) store(x + i, mul(mul(mul(load(o + i), r), load(weight + i)), silu(load(z + i))));
}

}  // namespace lily::cpu::LILY_CPU_NS
