// Grouped products: each tile is up to BM routed rows of one expert, found in the tile map that moe_scan wrote.
// moe_gemm_rows: y[s, n] = x[row of slot s] . W_e[n], or of x[s] when the rows are in slot order already (by_slot). y f32[T*k, N].
// moe_gate_up_rows: a[s, n] = round(silu(x . G_e[n]) * (x . U_e[n])). a act[T*k, N].
// grid, from the device: tiles of 64 outputs (fastest; 32 for a pair), tiles of the map; 128 threads. Dead tiles are never launched.
// Bytes moved: each weight of a touched expert once per tile, ceil(rows of the expert / BM) times. Order of sums: gemm_tile's.
#ifndef LILY_MOE_GEMM_KERNELS_H
#define LILY_MOE_GEMM_KERNELS_H
#include "gemm.h"

// Entry i of the map: expert, first slot, rows, 0.
inline GemmTile routed_tile(device const uint* map, uint i, constant LilyMoeRowsArgs& args, device const act* x, device const uint* slot_row, uint n0) {
  GemmTile t;
  const uint expert = map[4u * i], first = map[4u * i + 1u];
  t.N = args.N;
  t.n0 = n0;
  t.a_row = ulong(expert) * args.a_stride;
  t.b_row = ulong(expert) * args.b_stride;
  t.rows = map[4u * i + 2u];
  t.by_slot_list = args.by_slot == 0u;
  t.x = t.by_slot_list ? x : x + ulong(first) * args.K;
  t.slots = slot_row + first;
  return t;
}

inline Weight expert_weight(device const uint* codes, device const ushort* scales, device const ushort* biases, uint K, uint group) {
  Weight w;
  w.codes = codes;
  w.scales = scales;
  w.biases = biases;
  w.K = K;
  w.group = group;
  return w;
}

template <uint BM>
kernel void moe_gemm_rows(device const uint* slot_row [[buffer(1)]], device const act* x [[buffer(2)]], device float* y [[buffer(3)]], device const uint* codes [[buffer(4)]],
                          device const ushort* scales [[buffer(5)]], device const ushort* biases [[buffer(6)]], device const uint* map [[buffer(7)]],
                          constant LilyMoeRowsArgs& args [[buffer(20)]], uint3 group [[threadgroup_position_in_grid]], uint tid [[thread_index_in_threadgroup]],
                          uint sg [[simdgroup_index_in_threadgroup]]) {
  threadgroup act_pack xs[GEMM_BUFFERS * BM * GEMM_LD / 4];
  threadgroup act_pack ws[GEMM_BUFFERS * GEMM_OUTPUTS * GEMM_LD / 4];
  threadgroup uint4 raw[(GEMM_RAW + GEMM_OUTPUTS * GEMM_GROUPS) / 4];
  const uint n0 = group.x * GEMM_OUTPUTS, first = map[4u * group.y + 1u];
  GemmTile t = routed_tile(map, group.y, args, x, slot_row, n0);
  t.a = expert_weight(codes, scales, biases, args.K, args.a.group);
  t.b = t.a;
  gemm_tile<BM, false>(t, (threadgroup act*)xs, (threadgroup act*)ws, (threadgroup uint*)raw, tid, sg);
  threadgroup const float* sums = (threadgroup const float*)raw;
  for (uint i = tid; i < BM * GEMM_OUTPUTS; i += GEMM_THREADS) {
    const uint row = i / GEMM_OUTPUTS, n = n0 + i % GEMM_OUTPUTS;
    if (row < t.rows && n < args.N) y[ulong(first + row) * args.N + n] = sums[i];
  }
}

template <uint BM>
kernel void moe_gate_up_rows(device const uint* slot_row [[buffer(1)]], device const act* x [[buffer(2)]], device act* a [[buffer(3)]], device const uint* gate_codes [[buffer(4)]],
                             device const ushort* gate_scales [[buffer(5)]], device const ushort* gate_biases [[buffer(6)]], device const uint* up_codes [[buffer(7)]],
                             device const ushort* up_scales [[buffer(8)]], device const ushort* up_biases [[buffer(9)]], device const uint* map [[buffer(10)]],
                             constant LilyMoeRowsArgs& args [[buffer(20)]], uint3 group [[threadgroup_position_in_grid]], uint tid [[thread_index_in_threadgroup]],
                             uint sg [[simdgroup_index_in_threadgroup]]) {
  threadgroup act_pack xs[GEMM_BUFFERS * BM * GEMM_LD / 4];
  threadgroup act_pack ws[GEMM_BUFFERS * GEMM_OUTPUTS * GEMM_LD / 4];
  threadgroup uint4 raw[(GEMM_RAW + GEMM_OUTPUTS * GEMM_GROUPS) / 4];
  const uint n0 = group.x * (GEMM_OUTPUTS / 2u), first = map[4u * group.y + 1u];
  GemmTile t = routed_tile(map, group.y, args, x, slot_row, n0);
  t.by_slot_list = true;
  t.x = x;
  t.a = expert_weight(gate_codes, gate_scales, gate_biases, args.K, args.a.group);
  t.b = expert_weight(up_codes, up_scales, up_biases, args.K, args.b.group);
  gemm_tile<BM, true>(t, (threadgroup act*)xs, (threadgroup act*)ws, (threadgroup uint*)raw, tid, sg);
  threadgroup const float* sums = (threadgroup const float*)raw;
  for (uint i = tid; i < BM * GEMM_OUTPUTS / 2u; i += GEMM_THREADS) {
    const uint row = i / (GEMM_OUTPUTS / 2u), c = i % (GEMM_OUTPUTS / 2u), n = n0 + c;
    threadgroup const float* s = sums + row * GEMM_OUTPUTS + c;
    if (row < t.rows && n < args.N) a[ulong(first + row) * args.N + n] = round_act(swiglu(s[0], s[GEMM_OUTPUTS / 2u]));
  }
}

#endif
