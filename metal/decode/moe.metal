// Mixture of experts in decode: the chosen experts of one token. Expert tensors are stacks [E, rows, K]: row n of expert e is row e*stride + n.
// Bytes moved: the chosen experts' weights once; x, or h and weight, once a threadgroup, from cache.
// Order of a row's sums in quant.h, of the routing in route.h.
#include "lily.h"
#include "quant.h"
#include "reduce.h"
#include "route.h"

#define ROWS_PER_SIMDGROUP 4u
#define ROWS_PER_THREADGROUP 32u
#define DOWN_ROWS 16u  // of a threadgroup of moe_down: one partial sum of squares

// moe_gate_up: a_j = round(silu(G_ej x) * (U_ej x)), x = round(h * r * weight), for the top k of softmax(logits), ties to the lower index.
// h f32[K], ssq f32[K/16], weight f32[K], logits f32[E], ids u32[k], route f32[k], a act[k,I], gate and up stacks [E, I, K].
// grid: k * ceil(I/32) threadgroups of 8 simdgroups, each 4 rows of both weights. Threadgroup 0 writes ids and route.
// With `ninth` ceil(S/32) more make shared act[S] of the shared expert, whose weights have the formats of the others.
// Every threadgroup routes the token again, in its last simdgroup while the others make x: cheaper than a stage of its own.
template <uint MAX_K>
kernel void moe_gate_up(device const float* h [[buffer(0)]], device const float* ssq [[buffer(1)]], device const float* weight [[buffer(2)]],
                        device const float* logits [[buffer(3)]], device uint* ids [[buffer(4)]], device float* route [[buffer(5)]],
                        device act* a [[buffer(6)]], device const uint* gate_codes [[buffer(7)]], device const ushort* gate_scales [[buffer(8)]],
                        device const ushort* gate_biases [[buffer(9)]], device const uint* up_codes [[buffer(10)]],
                        device const ushort* up_scales [[buffer(11)]], device const ushort* up_biases [[buffer(12)]],
                        device const uint* ninth_gate_codes [[buffer(13)]], device const ushort* ninth_gate_scales [[buffer(14)]],
                        device const ushort* ninth_gate_biases [[buffer(15)]], device const uint* ninth_up_codes [[buffer(16)]],
                        device const ushort* ninth_up_scales [[buffer(17)]], device const ushort* ninth_up_biases [[buffer(18)]],
                        device act* shared [[buffer(19)]], constant LilyMoeArgs& args [[buffer(20)]], uint group [[threadgroup_position_in_grid]],
                        uint thread_index [[thread_index_in_threadgroup]], uint threads [[threads_per_threadgroup]],
                        uint simd [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup act_pack x[MAX_K / 4];
  threadgroup uint chosen[LILY_MAX_EXPERTS_PER_TOKEN];
  const uint K = args.K, makers = threads - 32u;
  if (thread_index >= makers) {
    uint id;
    float share;
    route_token(logits, args.E, args.k, lane, id, share);
    if (lane < args.k) {
      chosen[lane] = id;
      if (group == 0u) ids[lane] = id, route[lane] = share;
    }
  } else {
    const float r = rms_from_total(ssq_total(ssq, K, lane), K, args.eps);
    device const float4* h4 = (device const float4*)h;
    device const float4* weight4 = (device const float4*)weight;
    for (uint i = thread_index; i < K / 4u; i += makers) {
      float4 p = h4[i], w = weight4[i];
      x[i] = pack_act(float4(rms_apply(p.x, r, w.x), rms_apply(p.y, r, w.y), rms_apply(p.z, r, w.z), rms_apply(p.w, r, w.w)));
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  const uint blocks = (args.I + ROWS_PER_THREADGROUP - 1u) / ROWS_PER_THREADGROUP, routed = args.k * blocks;
  const bool is_ninth = args.ninth != 0u && group >= routed;
  const uint j = is_ninth ? 0u : group / blocks, rows = is_ninth ? args.S : args.I;
  const uint row = (is_ninth ? group - routed : group % blocks) * ROWS_PER_THREADGROUP + simd * ROWS_PER_SIMDGROUP;
  if (row < rows) {
    const uint n = min(ROWS_PER_SIMDGROUP, rows - row);
    ulong expert = chosen[j];
    Weight gate = {gate_codes, gate_scales, gate_biases, K, args.a.group}, up = {up_codes, up_scales, up_biases, K, args.b.group};
    device act* out = a + ulong(j) * args.I;
    if (is_ninth) {
      gate.codes = ninth_gate_codes, gate.scales = ninth_gate_scales, gate.biases = ninth_gate_biases;
      up.codes = ninth_up_codes, up.scales = ninth_up_scales, up.biases = ninth_up_biases;
      expert = 0ul;
      out = shared;
    }
    float g = dot_rows(W_FORMAT, gate, (threadgroup const act_pack*)x, expert * args.a_stride + row, n, lane);
    float u = dot_rows(W2_FORMAT, up, (threadgroup const act_pack*)x, expert * args.b_stride + row, n, lane);
    if (lane < n) out[row + lane] = round_act(swiglu(g, u));
  }
}
LILY_INSTANTIATE(moe_gate_up_2048, moe_gate_up, 2048)
LILY_INSTANTIATE(moe_gate_up_6144, moe_gate_up, 6144)

// moe_down: h += (sum over j of route_j * (D_ej a_j), j ascending) + sigmoid(shared_logit) * (D_s shared), and the partial sum of squares.
// a act[k,I], ids u32[k], route f32[k], shared act[S], shared_logit f32[1], h f32[H], ssq f32[H/16], down stack [E, H, I], shared [H, S].
// grid: H/16 threadgroups of 12 simdgroups: four quads of rows by three shares of the k + 1 experts, so that nine experts are three rounds.
// The products meet in threadgroup memory; lane r of simdgroup 0 adds the experts of row r in order.
kernel void moe_down(device const act_pack* a [[buffer(0)]], device const uint* ids [[buffer(1)]], device const float* route [[buffer(2)]],
                     device const act_pack* shared [[buffer(3)]], device const float* shared_logit [[buffer(4)]], device float* h [[buffer(5)]],
                     device float* ssq [[buffer(6)]], device const uint* codes [[buffer(7)]], device const ushort* scales [[buffer(8)]],
                     device const ushort* biases [[buffer(9)]], device const uint* shared_codes [[buffer(10)]],
                     device const ushort* shared_scales [[buffer(11)]], device const ushort* shared_biases [[buffer(12)]],
                     constant LilyMoeArgs& args [[buffer(20)]], uint group [[threadgroup_position_in_grid]],
                     uint simd [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float y[(LILY_MAX_EXPERTS_PER_TOKEN + 1) * DOWN_ROWS];
  const uint base = group * DOWN_ROWS, quad = simd % 4u * ROWS_PER_SIMDGROUP;
  const Weight down = {codes, scales, biases, args.I, args.a.group}, last = {shared_codes, shared_scales, shared_biases, args.S, args.b.group};
  if (base + quad < args.H) {
    const uint n = min(ROWS_PER_SIMDGROUP, args.H - base - quad);
    for (uint j = simd / 4u; j < args.k; j += 3u) {
      float sum = dot_rows(W_FORMAT, down, a + ulong(j) * (args.I / 4u), ulong(ids[j]) * args.a_stride + base + quad, n, lane);
      if (lane < n) y[j * DOWN_ROWS + quad + lane] = sum;
    }
    if (simd / 4u == args.k % 3u) {
      float sum = dot_rows(W2_FORMAT, last, shared, base + quad, n, lane);
      if (lane < n) y[args.k * DOWN_ROWS + quad + lane] = sum;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (simd == 0u) {
    float value = 0.0f;
    const bool live = lane < DOWN_ROWS && base + lane < args.H;
    if (live) {
      float sum = 0.0f;
      for (uint j = 0u; j < args.k; j++) sum = metal::fma(route[j], y[j * DOWN_ROWS + lane], sum);
      sum = metal::fma(sigmoid(shared_logit[0]), y[args.k * DOWN_ROWS + lane], sum);
      value = h[base + lane] + sum;
      h[base + lane] = value;
    }
    float partial = ssq_fold(value);
    if (lane == 0u) ssq[group] = partial;
  }
}
LILY_INSTANTIATE(moe_down, moe_down)

// moe_gemv: y_j = W_ej x, or W_ej x_j with per_expert_input: the twin of the two above, expert by expert.
// ids u32[k], x act[K] or act[k,K], y f32[k,N], W stack [E, N, K], N = args.I rows. grid: k * ceil(N/32)
kernel void moe_gemv(device const uint* ids [[buffer(0)]], device const act_pack* x [[buffer(1)]], device float* y [[buffer(2)]],
                     device const uint* codes [[buffer(3)]], device const ushort* scales [[buffer(4)]], device const ushort* biases [[buffer(5)]],
                     constant LilyMoeArgs& args [[buffer(20)]], uint group [[threadgroup_position_in_grid]],
                     uint simd [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  const uint blocks = (args.I + ROWS_PER_THREADGROUP - 1u) / ROWS_PER_THREADGROUP, j = group / blocks;
  const uint row = group % blocks * ROWS_PER_THREADGROUP + simd * ROWS_PER_SIMDGROUP;
  if (row < args.I) {
    const uint n = min(ROWS_PER_SIMDGROUP, args.I - row);
    Weight w = {codes, scales, biases, args.K, args.a.group};
    device const act_pack* input = args.per_expert_input != 0u ? x + ulong(j) * (args.K / 4u) : x;
    float sum = dot_rows(W_FORMAT, w, input, ulong(ids[j]) * args.a_stride + row, n, lane);
    if (lane < n) y[ulong(j) * args.I + row + lane] = sum;
  }
}
LILY_INSTANTIATE(moe_gemv, moe_gemv)
