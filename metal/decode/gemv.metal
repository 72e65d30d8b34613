// Matrix-vector products of decode: y = W x, with the norm in front, the residual behind, or gate and up joined.
// A threadgroup is 8 simdgroups of 4 rows: 32 output rows, two blocks of the recorder's grid. A lane takes 16 codes at a time (one load of
// 8 bytes at 4 bits, 256 neighbouring bytes a simdgroup) of four rows, so four loads and more are under way while it multiplies.
// Shapes: x act[K], h f32[K], ssq f32[K/16], weight f32[K], W [rows, K]. grid: ceil(rows/32), per segment.
// Bytes moved: the weight once (K*bits/8 + 4*K/group a row); x, or h and weight, once a threadgroup, from cache.
// Order of a row's sums in quant.h, of a norm's in reduce.h: gemv, gemv_norm and gemv_residual give a row the same bits.
// x of a norm is made once a threadgroup, rounded as the twin stores it. LILY_KERNEL=gemv=read leaves the arithmetic out (gemv_norm too).
#include "lily.h"
#include "quant.h"
#include "reduce.h"

#define ROWS_PER_THREADGROUP 32u
#define ROWS_PER_SIMDGROUP 4u

// x[i] = round(h * r * weight) by all threads of a threadgroup; a barrier must follow.
inline void normed_input(device const float* h, device const float* ssq, device const float* weight, uint K, float eps, uint thread_index, uint threads, uint lane,
                         threadgroup act_pack* x) {
  const float r = rms_from_total(ssq_total(ssq, K, lane), K, eps);
  device const float4* h4 = (device const float4*)h;
  device const float4* weight4 = (device const float4*)weight;
  for (uint i = thread_index; i < K / 4u; i += threads) {
    float4 a = h4[i], w = weight4[i];
    x[i] = pack_act(float4(rms_apply(a.x, r, w.x), rms_apply(a.y, r, w.y), rms_apply(a.z, r, w.z), rms_apply(a.w, r, w.w)));
  }
}

// The segment of threadgroup `group`, which becomes the threadgroup's place in it.
inline uint segment_of(constant LilyGemvArgs& args, thread uint& group) {
  uint s = 0u;
  for (uint i = 0; i + 1u < args.n_segments; i++) {
    uint groups = (args.seg[i].rows + ROWS_PER_THREADGROUP - 1u) / ROWS_PER_THREADGROUP;
    if (s == i && group >= groups) group -= groups, s = i + 1u;
  }
  return s;
}

// gemv: y_s = W_s x, for up to four weights of one format.
kernel void gemv(device const act_pack* x [[buffer(0)]], device float* y [[buffer(1)]], device const uint* codes0 [[buffer(2)]],
                 device const ushort* scales0 [[buffer(3)]], device const ushort* biases0 [[buffer(4)]], device const uint* codes1 [[buffer(5)]],
                 device const ushort* scales1 [[buffer(6)]], device const ushort* biases1 [[buffer(7)]], device const uint* codes2 [[buffer(8)]],
                 device const ushort* scales2 [[buffer(9)]], device const ushort* biases2 [[buffer(10)]], device const uint* codes3 [[buffer(11)]],
                 device const ushort* scales3 [[buffer(12)]], device const ushort* biases3 [[buffer(13)]], constant LilyGemvArgs& args [[buffer(20)]],
                 uint group [[threadgroup_position_in_grid]], uint simd [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  uint place = group;
  const uint s = segment_of(args, place), rows = args.seg[s].rows, row = place * ROWS_PER_THREADGROUP + simd * ROWS_PER_SIMDGROUP;
  if (row >= rows) return;
  Weight w = {codes0, scales0, biases0, args.K, args.fmt.group};
  if (s == 1u) w.codes = codes1, w.scales = scales1, w.biases = biases1;
  if (s == 2u) w.codes = codes2, w.scales = scales2, w.biases = biases2;
  if (s == 3u) w.codes = codes3, w.scales = scales3, w.biases = biases3;
  const uint n = min(ROWS_PER_SIMDGROUP, rows - row);
  float sum = dot_rows(W_FORMAT, w, x, row, n, lane);
  if (lane < n) y[args.seg[s].out + row + lane] = args.seg[s].round != 0u ? rounded(sum) : sum;
}
LILY_INSTANTIATE(gemv, gemv)

// gemv_norm: y_s = W_s x, x = round(h * r * weight), for up to four weights of one format. MAX_K bounds the threadgroup memory.
template <uint MAX_K>
kernel void gemv_norm(device const float* h [[buffer(0)]], device const float* ssq [[buffer(1)]], device const float* weight [[buffer(2)]],
                      device float* y [[buffer(3)]], device const uint* codes0 [[buffer(4)]], device const ushort* scales0 [[buffer(5)]],
                      device const ushort* biases0 [[buffer(6)]], device const uint* codes1 [[buffer(7)]], device const ushort* scales1 [[buffer(8)]],
                      device const ushort* biases1 [[buffer(9)]], device const uint* codes2 [[buffer(10)]], device const ushort* scales2 [[buffer(11)]],
                      device const ushort* biases2 [[buffer(12)]], device const uint* codes3 [[buffer(13)]], device const ushort* scales3 [[buffer(14)]],
                      device const ushort* biases3 [[buffer(15)]], constant LilyGemvArgs& args [[buffer(20)]], uint group [[threadgroup_position_in_grid]],
                      uint thread_index [[thread_index_in_threadgroup]], uint threads [[threads_per_threadgroup]],
                      uint simd [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup act_pack x[MAX_K / 4];
  normed_input(h, ssq, weight, args.K, args.eps, thread_index, threads, lane, x);
  threadgroup_barrier(mem_flags::mem_threadgroup);

  uint place = group;
  const uint s = segment_of(args, place);
  Weight w = {codes0, scales0, biases0, args.K, args.fmt.group};
  if (s == 1u) w.codes = codes1, w.scales = scales1, w.biases = biases1;
  if (s == 2u) w.codes = codes2, w.scales = scales2, w.biases = biases2;
  if (s == 3u) w.codes = codes3, w.scales = scales3, w.biases = biases3;
  const uint rows = args.seg[s].rows, row = place * ROWS_PER_THREADGROUP + simd * ROWS_PER_SIMDGROUP;
  if (row < rows) {
    const uint n = min(ROWS_PER_SIMDGROUP, rows - row);
    float sum = dot_rows(W_FORMAT, w, (threadgroup const act_pack*)x, row, n, lane);
    if (lane < n) y[args.seg[s].out + row + lane] = args.seg[s].round != 0u ? rounded(sum) : sum;
  }
}
LILY_INSTANTIATE(gemv_norm_2048, gemv_norm, 2048)
LILY_INSTANTIATE(gemv_norm_6144, gemv_norm, 6144)

// gemv_residual: h += W x, and the partial sums of squares of the new h. The row's owner adds; simdgroup 0 folds the squares.
kernel void gemv_residual(device const act_pack* x [[buffer(0)]], device float* h [[buffer(1)]], device float* ssq [[buffer(2)]],
                          device const uint* codes [[buffer(3)]], device const ushort* scales [[buffer(4)]], device const ushort* biases [[buffer(5)]],
                          constant LilyGemvArgs& args [[buffer(20)]], uint group [[threadgroup_position_in_grid]],
                          uint simd [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float fresh[ROWS_PER_THREADGROUP];
  const uint rows = args.seg[0].rows, base = group * ROWS_PER_THREADGROUP, row = base + simd * ROWS_PER_SIMDGROUP;
  float value = 0.0f;
  if (row < rows) {
    const uint n = min(ROWS_PER_SIMDGROUP, rows - row);
    Weight w = {codes, scales, biases, args.K, args.fmt.group};
    float sum = dot_rows(W_FORMAT, w, x, row, n, lane);
    if (lane < n) {
      value = h[row + lane] + sum;
      h[row + lane] = value;
    }
  }
  if (lane < ROWS_PER_SIMDGROUP) fresh[simd * ROWS_PER_SIMDGROUP + lane] = value;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (simd == 0u) {
    float partial = ssq_fold(fresh[lane]);
    if (lane % LILY_SSQ_BLOCK == 0u && base + lane < rows) ssq[(base + lane) / LILY_SSQ_BLOCK] = partial;
  }
}
LILY_INSTANTIATE(gemv_residual, gemv_residual)

// gate_up_norm: a = round(silu(G x) * (U x)). The lane that holds a row of G holds the same row of U.
template <uint MAX_K>
kernel void gate_up_norm(device const float* h [[buffer(0)]], device const float* ssq [[buffer(1)]], device const float* weight [[buffer(2)]],
                         device act* a [[buffer(3)]], device const uint* gate_codes [[buffer(4)]], device const ushort* gate_scales [[buffer(5)]],
                         device const ushort* gate_biases [[buffer(6)]], device const uint* up_codes [[buffer(7)]],
                         device const ushort* up_scales [[buffer(8)]], device const ushort* up_biases [[buffer(9)]],
                         constant LilyGateUpArgs& args [[buffer(20)]], uint group [[threadgroup_position_in_grid]],
                         uint thread_index [[thread_index_in_threadgroup]], uint threads [[threads_per_threadgroup]],
                         uint simd [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup act_pack x[MAX_K / 4];
  normed_input(h, ssq, weight, args.K, args.eps, thread_index, threads, lane, x);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint row = group * ROWS_PER_THREADGROUP + simd * ROWS_PER_SIMDGROUP;
  if (row < args.I) {
    const uint n = min(ROWS_PER_SIMDGROUP, args.I - row);
    Weight gate = {gate_codes, gate_scales, gate_biases, args.K, args.gate.group}, up = {up_codes, up_scales, up_biases, args.K, args.up.group};
    float g = dot_rows(W_FORMAT, gate, (threadgroup const act_pack*)x, row, n, lane);
    float u = dot_rows(W2_FORMAT, up, (threadgroup const act_pack*)x, row, n, lane);
    if (lane < n) a[row + lane] = round_act(swiglu(g, u));
  }
}
LILY_INSTANTIATE(gate_up_norm_2048, gate_up_norm, 2048)
LILY_INSTANTIATE(gate_up_norm_6144, gate_up_norm, 6144)
