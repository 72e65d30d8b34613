// Dense products of a chunk, T rows x act[T,K] with W [N,K]; weights are rounded to the activation storage as they are unpacked.
// gemm: y[t, out + n] = x[t] . W[n], rounded to the storage when asked. y f32[T, ldy].
// gemm_residual: h[t, n] += x[t] . W[n]. h f32[T,N].
// gate_up_rows: a[t, n] = round(silu(x[t] . G[n]) * (x[t] . U[n])). a act[T,N].
// grid: tiles of 16 or 32 rows (fastest, so that neighbours share their weights), tiles of 64 outputs (32 for a pair); 128 threads.
// Bytes moved: every weight once per tile of rows, x once per tile of outputs. Order of sums: that of gemm_tile, which
// gemm_simdgroup.h or gemm_tensor.h defines; one of them is included before.
#ifndef LILY_GEMM_KERNELS_H
#define LILY_GEMM_KERNELS_H
#include "gemm.h"

inline GemmTile dense_tile(device const act* x, uint first, uint rows, uint K, uint N, uint n0) {
  GemmTile t;
  t.N = N;
  t.n0 = n0;
  t.a_row = 0ul;
  t.b_row = 0ul;
  t.rows = rows;
  t.x = x + ulong(first) * K;
  t.slots = (device const uint*)x;
  t.by_slot_list = false;
  return t;
}

inline Weight weight_of(device const uint* codes, device const ushort* scales, device const ushort* biases, uint K, uint group) {
  Weight w;
  w.codes = codes;
  w.scales = scales;
  w.biases = biases;
  w.K = K;
  w.group = group;
  return w;
}

template <uint BM>
kernel void gemm(constant LilyStep& step [[buffer(0)]], device const act* x [[buffer(1)]], device float* y [[buffer(2)]], device const uint* codes [[buffer(3)]],
                 device const ushort* scales [[buffer(4)]], device const ushort* biases [[buffer(5)]], constant LilyGemmArgs& args [[buffer(20)]],
                 uint3 group [[threadgroup_position_in_grid]], uint tid [[thread_index_in_threadgroup]], uint sg [[simdgroup_index_in_threadgroup]]) {
  threadgroup act_pack xs[GEMM_BUFFERS * BM * GEMM_LD / 4];
  threadgroup act_pack ws[GEMM_BUFFERS * GEMM_OUTPUTS * GEMM_LD / 4];
  threadgroup uint4 raw[(GEMM_RAW + GEMM_OUTPUTS * GEMM_GROUPS) / 4];
  const uint first = group.x * BM, n0 = group.y * GEMM_OUTPUTS;
  if (first < step.rows) {
    GemmTile t = dense_tile(x, first, metal::min(BM, step.rows - first), args.K, args.N, n0);
    t.a = weight_of(codes, scales, biases, args.K, args.fmt.group);
    t.b = t.a;
    gemm_tile<BM, false>(t, (threadgroup act*)xs, (threadgroup act*)ws, (threadgroup uint*)raw, tid, sg);
    threadgroup const float* sums = (threadgroup const float*)raw;
    for (uint i = tid; i < BM * GEMM_OUTPUTS; i += GEMM_THREADS) {
      const uint row = i / GEMM_OUTPUTS, n = n0 + i % GEMM_OUTPUTS;
      if (row < t.rows && n < args.N) y[ulong(first + row) * args.ldy + args.out + n] = args.round != 0u ? rounded(sums[i]) : sums[i];
    }
  }
}

template <uint BM>
kernel void gemm_residual(constant LilyStep& step [[buffer(0)]], device const act* x [[buffer(1)]], device float* h [[buffer(2)]], device const uint* codes [[buffer(3)]],
                          device const ushort* scales [[buffer(4)]], device const ushort* biases [[buffer(5)]], constant LilyGemmArgs& args [[buffer(20)]],
                          uint3 group [[threadgroup_position_in_grid]], uint tid [[thread_index_in_threadgroup]], uint sg [[simdgroup_index_in_threadgroup]]) {
  threadgroup act_pack xs[GEMM_BUFFERS * BM * GEMM_LD / 4];
  threadgroup act_pack ws[GEMM_BUFFERS * GEMM_OUTPUTS * GEMM_LD / 4];
  threadgroup uint4 raw[(GEMM_RAW + GEMM_OUTPUTS * GEMM_GROUPS) / 4];
  const uint first = group.x * BM, n0 = group.y * GEMM_OUTPUTS;
  if (first < step.rows) {
    GemmTile t = dense_tile(x, first, metal::min(BM, step.rows - first), args.K, args.N, n0);
    t.a = weight_of(codes, scales, biases, args.K, args.fmt.group);
    t.b = t.a;
    gemm_tile<BM, false>(t, (threadgroup act*)xs, (threadgroup act*)ws, (threadgroup uint*)raw, tid, sg);
    threadgroup const float* sums = (threadgroup const float*)raw;
    for (uint i = tid; i < BM * GEMM_OUTPUTS; i += GEMM_THREADS) {
      const uint row = i / GEMM_OUTPUTS, n = n0 + i % GEMM_OUTPUTS;
      if (row < t.rows && n < args.N) h[ulong(first + row) * args.N + n] += sums[i];
    }
  }
}

template <uint BM>
kernel void gate_up_rows(constant LilyStep& step [[buffer(0)]], device const act* x [[buffer(1)]], device act* a [[buffer(2)]], device const uint* gate_codes [[buffer(3)]],
                         device const ushort* gate_scales [[buffer(4)]], device const ushort* gate_biases [[buffer(5)]], device const uint* up_codes [[buffer(6)]],
                         device const ushort* up_scales [[buffer(7)]], device const ushort* up_biases [[buffer(8)]], constant LilyGemmArgs& args [[buffer(20)]],
                         uint3 group [[threadgroup_position_in_grid]], uint tid [[thread_index_in_threadgroup]], uint sg [[simdgroup_index_in_threadgroup]]) {
  threadgroup act_pack xs[GEMM_BUFFERS * BM * GEMM_LD / 4];
  threadgroup act_pack ws[GEMM_BUFFERS * GEMM_OUTPUTS * GEMM_LD / 4];
  threadgroup uint4 raw[(GEMM_RAW + GEMM_OUTPUTS * GEMM_GROUPS) / 4];
  const uint first = group.x * BM, n0 = group.y * (GEMM_OUTPUTS / 2u);
  if (first < step.rows) {
    GemmTile t = dense_tile(x, first, metal::min(BM, step.rows - first), args.K, args.N, n0);
    t.a = weight_of(gate_codes, gate_scales, gate_biases, args.K, args.fmt.group);
    t.b = weight_of(up_codes, up_scales, up_biases, args.K, args.up.group);
    gemm_tile<BM, true>(t, (threadgroup act*)xs, (threadgroup act*)ws, (threadgroup uint*)raw, tid, sg);
    threadgroup const float* sums = (threadgroup const float*)raw;
    for (uint i = tid; i < BM * GEMM_OUTPUTS / 2u; i += GEMM_THREADS) {
      const uint row = i / (GEMM_OUTPUTS / 2u), c = i % (GEMM_OUTPUTS / 2u), n = n0 + c;
      threadgroup const float* s = sums + row * GEMM_OUTPUTS + c;
      if (row < t.rows && n < args.N) a[ulong(first + row) * args.N + n] = round_act(swiglu(s[0], s[GEMM_OUTPUTS / 2u]));
    }
  }
}

#endif
