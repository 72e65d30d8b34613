// What stands before and after the recurrent scan, row by row. Order of sums in gdn.h and reduce.h: the bits of gdn_step.
#include "lily.h"
#include "gdn_rows.h"

// gdn_prepare_rows: q = q / sqrt(sum q^2 + 1e-6) * Dk^-0.5, k = k / sqrt(sum k^2 + 1e-6) in place; g = exp(A softplus(a + dt_bias)), beta = sigmoid(b).
// step, y f32[T,C], b f32[T,ld_ba], a f32[T,ld_ba], A f32[Nv], dt_bias f32[Nv] -> gates f32[T,Nv,2]. grid: T threadgroups of 256, idle past
// step.rows. A head is a simdgroup's; q and k are read and written once.
template <uint N>
kernel void gdn_prepare_rows(constant LilyStep& step [[buffer(0)]], device float* y [[buffer(1)]], device const float* b [[buffer(2)]],
                             device const float* a [[buffer(3)]], device const float* A [[buffer(4)]], device const float* dt_bias [[buffer(5)]],
                             device float* gates [[buffer(6)]], constant LilyGdnArgs& args [[buffer(20)]], uint t [[threadgroup_position_in_grid]],
                             uint thread_index [[thread_index_in_threadgroup]], uint threads [[threads_per_threadgroup]],
                             uint simd [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  if (t >= step.rows) return;
  const uint Dk = args.Dk, heads = 2u * args.Nk;  // queries, then keys
  const bool live = lane * N < Dk;
  device float* row = y + ulong(t) * (heads * Dk + args.Nv * args.Dv);
  for (uint h = simd; h < heads; h += threads / 32u) {
    float x[N];
    LILY_UNROLL for (uint j = 0; j < N; j++) x[j] = 0.0f;
    load_slots<N>((device const float*)(row + h * Dk), live, lane, x);
    normalise_head<N>(x, h < args.Nk ? query_scale(Dk) : 1.0f);
    store_slots<N>(x, live, lane, row + h * Dk);
  }
  const ulong at = ulong(t) * args.ld_ba;
  device float2* pairs = (device float2*)gates + ulong(t) * args.Nv;
  for (uint n = thread_index; n < args.Nv; n += threads) pairs[n] = float2(decay_gate(a[at + n], A[n], dt_bias[n]), beta_gate(b[at + n]));
}
LILY_INSTANTIATE(gdn_prepare_rows_32, gdn_prepare_rows, 1)
LILY_INSTANTIATE(gdn_prepare_rows_64, gdn_prepare_rows, 2)
LILY_INSTANTIATE(gdn_prepare_rows_128, gdn_prepare_rows, 4)
LILY_INSTANTIATE(gdn_prepare_rows_256, gdn_prepare_rows, 8)

// gated_norm_rows: x = round(rms(o) * norm * silu(z)) per value head. step, o f32[T,Nv*Dv], z f32[T,ld_z], norm f32[Dv] -> x act[T,Nv*Dv].
// grid: T threadgroups of 256, idle past step.rows. A head is a simdgroup's; o is read twice, the second time from cache.
kernel void gated_norm_rows(constant LilyStep& step [[buffer(0)]], device const float* o [[buffer(1)]], device const float* z [[buffer(2)]],
                            device const float* norm [[buffer(3)]], device act* x [[buffer(4)]], constant LilyGdnArgs& args [[buffer(20)]],
                            uint t [[threadgroup_position_in_grid]], uint threads [[threads_per_threadgroup]],
                            uint simd [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  if (t >= step.rows) return;
  const uint Dv = args.Dv;
  for (uint n = simd; n < args.Nv; n += threads / 32u) {
    const ulong at = (ulong(t) * args.Nv + n) * Dv;
    device const float* zn = z + ulong(t) * args.ld_z + n * Dv;
    const float r = rms_from_total(square_sum(o + at, Dv, lane), Dv, args.eps);
    for (uint i = lane; i < Dv; i += 32u) x[at + i] = round_act(gated_norm(o[at + i], r, norm[i], zn[i]));
  }
}
LILY_INSTANTIATE(gated_norm_rows, gated_norm_rows)
