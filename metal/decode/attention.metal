// Decode attention around the split: prepare (norm, rope, K/V write) and combine (sum of the splits, output gate).
#include "lily.h"
#include "attn.h"

#define MAX_HEAD 256u

// attn_prepare. Threadgroup g < Hq: q[g] = round(rope(norm(query g))). Threadgroup Hq + j: K[position, j] = round(rope(norm(key j))),
// V[position, j] = round(value j). step, qkv f32[row], q_norm, k_norm f32[D], table -> K, V arenas, q act[Hq,D].
// grid: Hq + Hkv threadgroups of one simdgroup. Bytes: one qkv row without its gates in, Hq*D + 2*Hkv*D act out.
kernel void attn_prepare(constant LilyStep& step [[buffer(0)]], device const float* qkv [[buffer(1)]], device const float* q_norm [[buffer(2)]],
                         device const float* k_norm [[buffer(3)]], device const uint* table [[buffer(4)]], device act* K [[buffer(5)]],
                         device act* V [[buffer(6)]], device act* q [[buffer(7)]], constant LilyAttnArgs& args [[buffer(20)]],
                         uint group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float x[MAX_HEAD];
  const uint D = args.D, position = step.position;
  const bool is_query = group < args.Hq;
  const uint head = is_query ? group : group - args.Hq;
  device const float* source = qkv + (is_query ? query_offset(args, head) : key_offset(args, head));
  device const float* weight = is_query ? q_norm : k_norm;
  const float r = head_rms(source, D, args.eps, lane);
  for (uint i = lane; i < D; i += 32u) x[i] = (source[i] * r) * weight[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  rope_head(args, x, position, lane);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (is_query) {
    for (uint i = lane; i < D; i += 32u) q[head * D + i] = round_act(x[i]);
  } else {
    const ulong at = arena_offset(args, table, position, head);
    device const float* value = qkv + value_offset(args, head);
    for (uint i = lane; i < D; i += 32u) {
      K[at + i] = round_act(x[i]);
      V[at + i] = round_act(value[i]);
    }
  }
}
LILY_INSTANTIATE(attn_prepare, attn_prepare)

// attn_combine. o = (sum over s of e_s o_s) / (sum over s of e_s l_s), e_s = exp(m_s - max m), empty splits ignored;
// x = round(o * sigmoid(gate)), or o in f32 when not gated. o f32[splits,Hq,D], ml f32[splits,Hq,2], qkv f32[row] -> x.
// grid: Hq threadgroups of a thread per element (in whole simdgroups). Bytes: the live splits of o once.
// Order: the denominator by lane_sum, lane s holding split s and then s + 32; an element adds the splits ascending, by fma.
kernel void attn_combine(device const float* o [[buffer(1)]], device const float* ml [[buffer(2)]], device float* x [[buffer(3)]], device const float* qkv [[buffer(4)]], constant LilyAttnArgs& args [[buffer(20)]],
                         uint head [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
                         uint simd [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float factor[LILY_MAX_SPLITS];
  threadgroup float total[1];
  const uint D = args.D;
  if (simd == 0u) {
    float m[2], l[2];
    LILY_UNROLL for (uint i = 0; i < 2u; i++) {
      uint s = lane + 32u * i;
      m[i] = minus_infinity();
      l[i] = 0.0f;
      if (s < args.n_splits) {
        device const float* pair = ml + 2u * (s * args.Hq + head);
        l[i] = pair[1];
        if (l[i] != 0.0f) m[i] = pair[0];
      }
    }
    const float highest = simd_max(max(m[0], m[1]));
    float sum = 0.0f;
    LILY_UNROLL for (uint i = 0; i < 2u; i++) {
      float e = l[i] != 0.0f ? metal::exp(m[i] - highest) : 0.0f;
      factor[lane + 32u * i] = e;
      sum = metal::fma(e, l[i], sum);
    }
    sum = lane_sum(sum);
    if (lane == 0u) total[0] = sum;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (thread_index < D) {
    float sum = 0.0f;
    for (uint s = 0; s < args.n_splits; s++)
      if (factor[s] != 0.0f) sum = metal::fma(factor[s], o[(s * args.Hq + head) * D + thread_index], sum);
    const float value = sum * (1.0f / total[0]);
    const uint at = head * D + thread_index;
    if (args.gated != 0u) {
      device act* out = (device act*)x;
      out[at] = round_act(gated(value, qkv[gate_offset(args, head) + thread_index]));
    } else {
      x[at] = value;
    }
  }
}
LILY_INSTANTIATE(attn_combine, attn_combine)
