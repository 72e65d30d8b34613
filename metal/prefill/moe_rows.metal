// What stands after the products of prefill's experts and dense layers, four neighbouring values a thread.
// grid: ceil(width/1024) x T threadgroups of 256, idle past step.rows. Everything is read and written once.
#include "lily.h"

// swiglu_rows: a = round(silu(gate) * up). step, gate f32[T*m,N], up f32[T*m,N] -> a act[T*m,N], m = rows_per_token. width: N*m, a multiple of 4.
kernel void swiglu_rows(constant LilyStep& step [[buffer(0)]], device const float4* gate [[buffer(1)]], device const float4* up [[buffer(2)]],
                        device act_pack* a [[buffer(3)]], constant LilyGemmArgs& args [[buffer(20)]], uint2 group [[threadgroup_position_in_grid]],
                        uint thread_index [[thread_index_in_threadgroup]], uint threads [[threads_per_threadgroup]]) {
  const uint width = args.N * args.rows_per_token / 4u, i = group.x * threads + thread_index;
  if (group.y >= step.rows || i >= width) return;
  const ulong at = ulong(group.y) * width + i;
  const float4 g = gate[at], u = up[at];
  a[at] = pack_act(float4(swiglu(g.x, u.x), swiglu(g.y, u.y), swiglu(g.z, u.z), swiglu(g.w, u.w)));
}
LILY_INSTANTIATE(swiglu_rows, swiglu_rows)

// moe_combine_rows: h += (sum over j of route_j * y[slot_of_j], j ascending, by fma) + sigmoid(shared_logit) * shared.
// step, slot_of u32[T,k] (absent: y is in the order of route), route f32[T,k], y f32[T*k,H], shared f32[T,H], shared_logit f32[T], h f32[T,H].
// width: H, a multiple of 4.
kernel void moe_combine_rows(constant LilyStep& step [[buffer(0)]], device const uint* slot_of [[buffer(1)]], device const float* route [[buffer(2)]],
                             device const float4* y [[buffer(3)]], device const float4* shared [[buffer(4)]],
                             device const float* shared_logit [[buffer(5)]], device float4* h [[buffer(6)]],
                             constant LilyMoeRowsArgs& args [[buffer(20)]], constant uint& present [[buffer(21)]],
                             uint2 group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
                             uint threads [[threads_per_threadgroup]]) {
  const uint width = args.H / 4u, i = group.x * threads + thread_index, t = group.y, k = args.k;
  if (t >= step.rows || i >= width) return;
  const bool sorted = is_bound(present, 1u);
  const float gate = sigmoid(shared_logit[t]);
  float4 sum = float4(0.0f);
  for (uint j = 0; j < k; j++) {
    const ulong choice = ulong(t) * k + j, slot = sorted ? ulong(slot_of[choice]) : choice;
    sum = metal::fma(float4(route[choice]), y[slot * width + i], sum);
  }
  sum = metal::fma(float4(gate), shared[ulong(t) * width + i], sum);
  h[ulong(t) * width + i] += sum;
}
LILY_INSTANTIATE(moe_combine_rows, moe_combine_rows)
