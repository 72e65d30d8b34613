// What stands around prefill attention, row by row: head norms, rope, the K/V write, the output gate; fused as attn_prepare_rows, and its twins.
// Arithmetic in attn.h, as in attn_prepare: equal bits. A head is a simdgroup's. grid: T threadgroups of 256, idle past step.rows.
#include "lily.h"
#include "attn.h"

#define MAX_PAIRS 128u  // R at most 256

// Cosine and sine of each pair's angle at a position, once for all heads of a row. All threads call it, a barrier must follow.
inline void rope_table(constant LilyAttnArgs& a, uint position, uint thread_index, uint threads, threadgroup float* cosine, threadgroup float* sine) {
  for (uint j = thread_index; j < a.R / 2u; j += threads) {
    const float angle = float(position) * rope_frequency(a.rope_theta, j, a.R / 2u);
    cosine[j] = metal::precise::cos(angle);
    sine[j] = metal::precise::sin(angle);
  }
}

// A head before rope: x, or (x * r) * weight when it is still to be normed.
struct Head {
  device const float* x;
  device const float* weight;
  float r;
  bool normed;
};
inline float element(thread const Head& h, uint i) { return h.normed ? h.x[i] : (h.x[i] * h.r) * h.weight[i]; }

// out = round(rope(head)), by one simdgroup.
inline void store_turned(constant LilyAttnArgs& a, thread const Head& head, threadgroup const float* cosine, threadgroup const float* sine, uint lane,
                         device act* out) {
  const uint pairs = a.R / 2u;
  for (uint j = lane; j < pairs; j += 32u) {
    const float x = element(head, j), y = element(head, j + pairs), c = cosine[j], s = sine[j];
    out[j] = round_act(x * c - y * s);
    out[j + pairs] = round_act(y * c + x * s);
  }
  for (uint i = a.R + lane; i < a.D; i += 32u) out[i] = round_act(element(head, i));
}

inline void store_rounded(device const float* x, uint D, uint lane, device act* out) {
  for (uint i = lane; i < D; i += 32u) out[i] = round_act(x[i]);
}

// attn_prepare_rows. At position + t: q[t] = round(rope(norm(queries))); K = round(rope(norm(keys))), V = round(values).
// step, qkv f32[T,row], q_norm, k_norm f32[D], table -> K, V arenas, q act[T,Hq,D]. Bytes: qkv without its gates, q, K and V once.
kernel void attn_prepare_rows(constant LilyStep& step [[buffer(0)]], device const float* qkv [[buffer(1)]], device const float* q_norm [[buffer(2)]],
                              device const float* k_norm [[buffer(3)]], device const uint* table [[buffer(4)]], device act* K [[buffer(5)]],
                              device act* V [[buffer(6)]], device act* q [[buffer(7)]], constant LilyAttnArgs& args [[buffer(20)]],
                              uint t [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
                              uint threads [[threads_per_threadgroup]], uint simd [[simdgroup_index_in_threadgroup]],
                              uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float cosine[MAX_PAIRS];
  threadgroup float sine[MAX_PAIRS];
  if (t >= step.rows) return;  // all threads alike
  const uint D = args.D, position = step.position + t;
  device const float* row = qkv + ulong(t) * args.ld;
  rope_table(args, position, thread_index, threads, cosine, sine);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint h = simd; h < args.Hq + args.Hkv; h += threads / 32u) {
    const bool is_query = h < args.Hq;
    const uint j = h - args.Hq;
    Head head = {row + (is_query ? query_offset(args, h) : key_offset(args, j)), is_query ? q_norm : k_norm, 0.0f, false};
    head.r = head_rms(head.x, D, args.eps, lane);
    const ulong at = is_query ? (ulong(t) * args.Hq + h) * D : arena_offset(args, table, position, j);
    store_turned(args, head, cosine, sine, lane, (is_query ? q : K) + at);
    if (!is_query) store_rounded(row + value_offset(args, j), D, lane, V + at);
  }
}
LILY_INSTANTIATE(attn_prepare_rows, attn_prepare_rows)

// head_norm_rows. out[t,h] = norm(x[t,h]) * weight, f32[T,heads,D]: the query heads, or the key heads when args.key.
kernel void head_norm_rows(constant LilyStep& step [[buffer(0)]], device const float* qkv [[buffer(1)]], device const float* weight [[buffer(2)]],
                           device float* out [[buffer(3)]], constant LilyAttnArgs& args [[buffer(20)]], uint t [[threadgroup_position_in_grid]],
                           uint threads [[threads_per_threadgroup]], uint simd [[simdgroup_index_in_threadgroup]],
                           uint lane [[thread_index_in_simdgroup]]) {
  if (t >= step.rows) return;
  const bool keys = args.key != 0u;
  const uint D = args.D, heads = keys ? args.Hkv : args.Hq;
  for (uint h = simd; h < heads; h += threads / 32u) {
    device const float* x = qkv + ulong(t) * args.ld + (keys ? key_offset(args, h) : query_offset(args, h));
    Head head = {x, weight, head_rms(x, D, args.eps, lane), false};
    for (uint i = lane; i < D; i += 32u) out[(ulong(t) * heads + h) * D + i] = element(head, i);
  }
}
LILY_INSTANTIATE(head_norm_rows, head_norm_rows)

// rope_rows. q[t,h] = round(rope(x[t,h])), x f32[T,Hq,D] after its norm.
kernel void rope_rows(constant LilyStep& step [[buffer(0)]], device const float* x [[buffer(1)]], device act* q [[buffer(2)]],
                      constant LilyAttnArgs& args [[buffer(20)]], uint t [[threadgroup_position_in_grid]],
                      uint thread_index [[thread_index_in_threadgroup]], uint threads [[threads_per_threadgroup]],
                      uint simd [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float cosine[MAX_PAIRS];
  threadgroup float sine[MAX_PAIRS];
  if (t >= step.rows) return;
  rope_table(args, step.position + t, thread_index, threads, cosine, sine);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint h = simd; h < args.Hq; h += threads / 32u) {
    const ulong at = (ulong(t) * args.Hq + h) * args.D;
    Head head = {x + at, x + at, 1.0f, true};
    store_turned(args, head, cosine, sine, lane, q + at);
  }
}
LILY_INSTANTIATE(rope_rows, rope_rows)

// kv_write_rows. K[position + t, j] = round(rope(k[t,j])), k f32[T,Hkv,D] after its norm; V[position + t, j] = round(value j of qkv).
kernel void kv_write_rows(constant LilyStep& step [[buffer(0)]], device const float* k [[buffer(1)]], device const float* qkv [[buffer(2)]],
                          device const uint* table [[buffer(3)]], device act* K [[buffer(4)]], device act* V [[buffer(5)]],
                          constant LilyAttnArgs& args [[buffer(20)]], uint t [[threadgroup_position_in_grid]],
                          uint thread_index [[thread_index_in_threadgroup]], uint threads [[threads_per_threadgroup]],
                          uint simd [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float cosine[MAX_PAIRS];
  threadgroup float sine[MAX_PAIRS];
  if (t >= step.rows) return;
  const uint D = args.D, position = step.position + t;
  rope_table(args, position, thread_index, threads, cosine, sine);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint j = simd; j < args.Hkv; j += threads / 32u) {
    device const float* key = k + (ulong(t) * args.Hkv + j) * D;
    const ulong at = arena_offset(args, table, position, j);
    Head head = {key, key, 1.0f, true};
    store_turned(args, head, cosine, sine, lane, K + at);
    store_rounded(qkv + ulong(t) * args.ld + value_offset(args, j), D, lane, V + at);
  }
}
LILY_INSTANTIATE(kv_write_rows, kv_write_rows)

// gate_rows. x[t,h] = round(o[t,h] * sigmoid(gate h of qkv)), o f32[T,Hq*D].
kernel void gate_rows(constant LilyStep& step [[buffer(0)]], device const float* o [[buffer(1)]], device const float* qkv [[buffer(2)]],
                      device act* x [[buffer(3)]], constant LilyAttnArgs& args [[buffer(20)]], uint t [[threadgroup_position_in_grid]],
                      uint threads [[threads_per_threadgroup]], uint simd [[simdgroup_index_in_threadgroup]],
                      uint lane [[thread_index_in_simdgroup]]) {
  if (t >= step.rows) return;
  for (uint h = simd; h < args.Hq; h += threads / 32u) {
    const ulong at = (ulong(t) * args.Hq + h) * args.D;
    device const float* gate = qkv + ulong(t) * args.ld + gate_offset(args, h);
    for (uint i = lane; i < args.D; i += 32u) x[at + i] = round_act(gated(o[at + i], gate[i]));
  }
}
LILY_INSTANTIATE(gate_rows, gate_rows)
