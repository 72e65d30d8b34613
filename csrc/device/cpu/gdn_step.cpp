// gdn_step: one decode step of Gated DeltaNet between its input and output projections, one value head per threadgroup.
//   y = silu(conv over the three stored rows and this one), q and k l2-normalised, q * Dk^-0.5
//   g = exp(A softplus(a + dt_bias)), beta = sigmoid(b); u = S k, p = S q (old state, dk ascending)
//   d = beta (v - g u); S' = g S + d k^T; x = round(rms(g p + d (k.q)) * norm * silu(z))
// proj f32[C + Nv*Dv + 2 Nv], conv_w f32[4,C], A, dt_bias f32[Nv], norm f32[Dv], conv act[3,C], S f32[Nv,Dk,Dv] -> conv', S', x act[Nv*Dv]. grid: Nv
// Bytes moved: S read and written once (8 Nv Dk Dv); the second pass finds its columns in cache.
#include "device/cpu/gdn.hpp"
#include "device/cpu/kernel.hpp"

namespace lily::cpu::LILY_CPU_NS {
namespace {

template <class Act> struct StepConv {
  const float *now, *weight;  // raw qkv of this token; weight [4,C]
  const Act* in;
  Act* out;
  uint32_t C;
};

// y = the channels [c, c+n) of this token after the convolution; their owner also writes the stored rows.
template <class Act> LILY_OUTLINE void step_conv(const StepConv<Act>& s, uint32_t c, uint32_t n, bool owner, float* y) {
  const uint32_t C = s.C;
  for (uint32_t i = c; i < c + n; i += 16) {
    const float* w = s.weight + i;
    V x0 = load(s.in + i), x1 = load(s.in + C + i), x2 = load(s.in + 2 * C + i), x3 = load(s.now + i);
    store(y + (i - c), conv_silu(load(w), load(w + C), load(w + 2 * C), load(w + 3 * C), x0, x1, x2, x3));
    if (!owner) continue;
    store(s.out + i, x1);
    store(s.out + C + i, x2);
    store(s.out + 2 * C + i, x3);
  }
}

struct StepHead {
  const float *q, *k, *v;
  float g, beta, kq;
  uint32_t Dk, Dv;
};

constexpr uint32_t kPrefetchRows = 8;

// Columns [c, c + 16 N) of one head's state and output. The first columns of a head fetch whole rows ahead for the others.
template <int N> LILY_INLINE void step_columns(const StepHead& h, const float* S_in, float* S_out, uint32_t c, float* o) {
  const uint32_t ahead = kPrefetchRows * h.Dv, fetched = c == 0 ? h.Dv : 0;
  Columns<N> u = zero_columns<N>(), p = u;
  for (uint32_t dk = 0; dk < h.Dk; dk++) {
    const float* row = S_in + dk * h.Dv;
    for (uint32_t i = 0; i < fetched; i += 16) __builtin_prefetch(row + ahead + i);
    Columns<N> s = load_columns<N>(row + c);
    u = fma_columns<N>(s, splat(h.k[dk]), u);
    p = fma_columns<N>(s, splat(h.q[dk]), p);
  }
  V g = splat(h.g);
  Columns<N> d = delta_columns<N>(u, g, splat(h.beta), load_columns<N>(h.v + c));
  store_columns<N>(o + c, fma_columns<N>(d, splat(h.kq), scaled<N>(p, g)));
  for (uint32_t dk = 0; dk < h.Dk; dk++) {
    float* row = S_out + dk * h.Dv;
    for (uint32_t i = 0; i < fetched; i += 16) __builtin_prefetch(row + ahead + i, 1);
    Columns<N> s = load_columns<N>(S_in + dk * h.Dv + c);
    store_columns<N>(row + c, fma_columns<N>(d, splat(h.k[dk]), scaled<N>(s, g)));
  }
}

}  // namespace

template <class Act> static void gdn_step(const KernelCall& c, uint32_t begin, uint32_t end) {
  const auto& a = args<LilyGdnArgs>(c);
  const uint32_t Dk = a.Dk, Dv = a.Dv, keys = a.Nk * Dk, C = 2 * keys + a.Nv * Dv, ratio = a.Nv / a.Nk;
  const float *proj = buffer<float>(c, 0), *A = buffer<float>(c, 2), *dt_bias = buffer<float>(c, 3), *norm = buffer<float>(c, 4);
  const float *z = proj + C, *b = z + a.Nv * Dv, *alpha = b + a.Nv;
  const StepConv<Act> conv{proj, buffer<float>(c, 1), buffer<Act>(c, 5), buffer<Act>(c, 7), C};
  for (uint32_t n = begin; n < end; n++) {
    float q[kMaxHeadDim], k[kMaxHeadDim], v[kMaxHeadDim], o[kMaxHeadDim];
    uint32_t key = n / ratio;
    bool first_of_key = n % ratio == 0;
    step_conv(conv, key * Dk, Dk, first_of_key, q);
    step_conv(conv, keys + key * Dk, Dk, first_of_key, k);
    step_conv(conv, 2 * keys + n * Dv, Dv, true, v);
    normalise_query(q, Dk);
    normalise_key(k, Dk);
    Gates gates{{alpha[n]}, {b[n]}, {A[n]}, {dt_bias[n]}, {}, {}};
    run_gates(gates);
    const StepHead head{q, k, v, gates.g[0], gates.beta[0], dot(k, q, Dk), Dk, Dv};
    const float* S_in = buffer<float>(c, 6) + uint64_t(n) * Dk * Dv;
    float* S_out = buffer<float>(c, 8) + uint64_t(n) * Dk * Dv;
    uint32_t column = 0;
    for (; column + 16 * kStateColumns <= Dv; column += 16 * kStateColumns) step_columns<kStateColumns>(head, S_in, S_out, column, o);
    for (; column < Dv; column += 16) step_columns<1>(head, S_in, S_out, column, o);
    gated_norm(o, z + n * Dv, norm, Dv, a.eps, buffer<Act>(c, 9) + n * Dv);
  }
}

}  // namespace lily::cpu::LILY_CPU_NS

LILY_KERNELS(gdn_step, {"gdn_step", gdn_step<Bf16>, gdn_step<F32>})
