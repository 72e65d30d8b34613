// The row kernels around the recurrent scan: convolution, q/k norms and gates, gated norm. Rows past step.rows are not touched.
#include "device/cpu/gdn.hpp"
#include "device/cpu/kernel.hpp"

namespace lily::cpu::LILY_CPU_NS {
namespace {

template <class Act> struct ConvRows {
  const float* qkv;
  const Act* in;
  uint32_t ld, C;
};

// Channels i.. of row t; rows before the chunk (t = -3..-1) come from the stored state.
template <class Act> LILY_INLINE V conv_input(const ConvRows<Act>& x, int64_t t, uint32_t i) {
  return t < 0 ? load(x.in + uint64_t(t + 3) * x.C + i) : load(x.qkv + uint64_t(t) * x.ld + i);
}

// Stores the three rows that end with row `last`, oldest first.
template <class Act> LILY_INLINE void store_conv(const ConvRows<Act>& x, int64_t last, Act* out) {
  for (int64_t j = 0; j < 3; j++)
    for (uint32_t i = 0; i < x.C; i += 16) store(out + uint64_t(j) * x.C + i, conv_input(x, last - 2 + j, i));
}

}  // namespace

// y[t,c] = silu(sum over j of w[j,c] qkv[t-3+j,c]), taps oldest first.
// step, qkv f32[T,ld] (rounded), conv_w f32[4,C], conv_in act[3,C] -> conv_out act[3,C], y f32[T,C], snapshots act[3,C]. grid: T/32
// Whole rows one after the other, as they lie in memory; the three before are still in cache.
template <class Act> static void conv_rows(const KernelCall& c, uint32_t begin, uint32_t end) {
  const auto& a = args<LilyGdnArgs>(c);
  const auto& step = *buffer<LilyStep>(c, 0);
  const uint32_t C = 2 * a.Nk * a.Dk + a.Nv * a.Dv, rows = step.rows;
  const float* weight = buffer<float>(c, 2);
  const ConvRows<Act> x{buffer<float>(c, 1), buffer<Act>(c, 3), a.ld_qkv, C};
  float* y = buffer<float>(c, 5);
  const uint32_t from = begin * LILY_CONV_ROWS, to = end * LILY_CONV_ROWS < rows ? end * LILY_CONV_ROWS : rows;
  for (uint32_t t = from; t < to; t++)
    for (uint32_t i = 0; i < C; i += 16) {
      const float* w = weight + i;
      V x0 = conv_input(x, int64_t(t) - 3, i), x1 = conv_input(x, int64_t(t) - 2, i), x2 = conv_input(x, int64_t(t) - 1, i);
      V r = conv_silu(load(w), load(w + C), load(w + 2 * C), load(w + 3 * C), x0, x1, x2, conv_input(x, t, i));
      store(y + uint64_t(t) * C + i, r);
    }
  // who has a row also stores what a state after it holds
  const auto has = [&](uint32_t t) { return t >= from && t < to; };
  if (has(rows - 1)) store_conv(x, int64_t(rows) - 1, buffer<Act>(c, 4));
  for (uint32_t s = 0; s < step.n_snapshots && s < LILY_MAX_SNAPSHOTS; s++)
    if (c.buffers[6 + s] && has(step.snapshot_rows[s])) store_conv(x, step.snapshot_rows[s], buffer<Act>(c, 6 + int(s)));
}

// q = q / sqrt(sum q^2 + 1e-6) * Dk^-0.5, k = k / sqrt(sum k^2 + 1e-6) in place; g = exp(A softplus(a + dt_bias)), beta = sigmoid(b).
// step, y f32[T,C], b f32[T,ld_ba], a f32[T,ld_ba], A f32[Nv], dt_bias f32[Nv] -> gates f32[T,Nv,2]. grid: T
template <class Act> static void gdn_prepare_rows(const KernelCall& c, uint32_t begin, uint32_t end) {
  const auto& a = args<LilyGdnArgs>(c);
  const auto& step = *buffer<LilyStep>(c, 0);
  const uint32_t Dk = a.Dk, C = 2 * a.Nk * Dk + a.Nv * a.Dv;
  const float *A = buffer<float>(c, 4), *dt_bias = buffer<float>(c, 5);
  for (uint32_t t = begin; t < end && t < step.rows; t++) {
    float* q = buffer<float>(c, 1) + uint64_t(t) * C;
    float* k = q + a.Nk * Dk;
    for (uint32_t h = 0; h < a.Nk; h++) {
      normalise_query(q + h * Dk, Dk);
      normalise_key(k + h * Dk, Dk);
    }
    const float *b = buffer<float>(c, 2) + uint64_t(t) * a.ld_ba, *alpha = buffer<float>(c, 3) + uint64_t(t) * a.ld_ba;
    float* gates = buffer<float>(c, 6) + uint64_t(t) * a.Nv * 2;
    for (uint32_t n = 0; n < a.Nv; n += 16) {
      const uint32_t heads = a.Nv - n < 16 ? a.Nv - n : 16;
      Gates x{};
      for (uint32_t i = 0; i < heads; i++) x.a[i] = alpha[n + i], x.b[i] = b[n + i], x.A[i] = A[n + i], x.dt_bias[i] = dt_bias[n + i];
      run_gates(x);
      for (uint32_t i = 0; i < heads; i++) gates[2 * (n + i)] = x.g[i], gates[2 * (n + i) + 1] = x.beta[i];
    }
  }
}

// x = round(rms(o) * norm * silu(z)) per value head. step, o f32[T,Nv*Dv], z f32[T,ld_z], norm f32[Dv] -> x act[T,Nv*Dv]. grid: T
template <class Act> static void gated_norm_rows(const KernelCall& c, uint32_t begin, uint32_t end) {
  const auto& a = args<LilyGdnArgs>(c);
  const auto& step = *buffer<LilyStep>(c, 0);
  const uint32_t Dv = a.Dv, width = a.Nv * Dv;
  for (uint32_t t = begin; t < end && t < step.rows; t++) {
    const float *o = buffer<float>(c, 1) + uint64_t(t) * width, *z = buffer<float>(c, 2) + uint64_t(t) * a.ld_z;
    Act* x = buffer<Act>(c, 4) + uint64_t(t) * width;
    for (uint32_t n = 0; n < width; n += Dv) gated_norm(o + n, z + n, buffer<float>(c, 3), Dv, a.eps, x + n);
  }
}

}  // namespace lily::cpu::LILY_CPU_NS

LILY_KERNELS(gdn_rows, {"conv_rows", conv_rows<Bf16>, conv_rows<F32>}, {"gdn_prepare_rows", gdn_prepare_rows<Bf16>, gdn_prepare_rows<F32>},
             {"gated_norm_rows", gated_norm_rows<Bf16>, gated_norm_rows<F32>})
