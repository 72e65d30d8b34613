// gdn_scan: the recurrence of Gated DeltaNet over the rows of a chunk. Per value head and token:
//   u = S k, p = S q (old state); d = beta (v - g u); S = g S + d k^T; o = g p + d (k.q)
// step, y f32[T,C] (q and k normalised), gates f32[T,Nv,2] (g, beta), S_in f32[Nv,Dk,Dv] -> S_out, o f32[T,Nv*Dv], snapshots of S.
// grid: ceil(Dv/32) x Nv threadgroups of 8 simdgroups. A simdgroup owns 4 columns of a head's state from the first row to the last, in
// registers: lane l holds slot l of gdn.h of each. The four share every load of q and k, and the next row's loads start a row ahead.
// Bytes moved: S read and written once, 8 Nv Dk Dv; q and k once per 4 columns, from cache; v, gates and o once.
// BLOCKS, for comparison: the state goes through S_out every 32 rows, as in a scan block by block.
// Order of sums in gdn.h: the bits of gdn_step. A row's bits do not depend on where a chunk begins.
#include "lily.h"
#include "gdn_rows.h"

constant bool BLOCKS [[function_constant(2)]];

#define COLUMNS 4u  // of a simdgroup
#define BLOCK 32u   // rows between visits to memory in the comparison

// Four columns of a head's state, S[dk][column .. column + 3]; columns[c * N + j] is slot element j of column c.
template <uint N> inline void load_state(device const float* S, uint Dv, bool live, uint lane, thread float* columns) {
  LILY_UNROLL for (uint j = 0; j < N; j++) {
    float4 v = live ? *(device const float4*)(S + (lane * N + j) * Dv) : float4(0.0f);
    columns[j] = v.x, columns[N + j] = v.y, columns[2u * N + j] = v.z, columns[3u * N + j] = v.w;
  }
}
template <uint N> inline void store_state(thread const float* columns, uint Dv, bool live, uint lane, device float* S) {
  if (!live) return;
  LILY_UNROLL for (uint j = 0; j < N; j++)
    *(device float4*)(S + (lane * N + j) * Dv) = float4(columns[j], columns[N + j], columns[2u * N + j], columns[3u * N + j]);
}

// Lane l gets the sum over all lanes of u for column l % 4 when l & 4 is clear, of p when it is set; each in the order of lane_sum.
template <uint N> inline float both_sums(thread const float* columns, thread const float* k, thread const float* q, uint lane) {
  float u = fold_quad(slot_dot<N>(columns, k), slot_dot<N>(columns + N, k), slot_dot<N>(columns + 2u * N, k), slot_dot<N>(columns + 3u * N, k), lane);
  float p = fold_quad(slot_dot<N>(columns, q), slot_dot<N>(columns + N, q), slot_dot<N>(columns + 2u * N, q), slot_dot<N>(columns + 3u * N, q), lane);
  const bool second = (lane & 4u) != 0u;
  float x = (second ? p : u) + simd_shuffle_xor(second ? u : p, ushort(4));
  x += simd_shuffle_xor(x, ushort(8));
  return x + simd_shuffle_xor(x, ushort(16));
}

// Whether snapshot i is the state after row t, and its buffer is there.
inline bool is_taken(constant LilyStep& step, uint present, uint i, uint t) {
  return i < step.n_snapshots && step.snapshot_rows[i] == t && is_bound(present, 6u + i);
}

template <uint N>
kernel void gdn_scan(constant LilyStep& step [[buffer(0)]], device const float* y [[buffer(1)]], device const float* gates [[buffer(2)]],
                     device const float* S_in [[buffer(3)]], device float* S_out [[buffer(4)]], device float* o [[buffer(5)]],
                     device float* snapshot0 [[buffer(6)]], device float* snapshot1 [[buffer(7)]], device float* snapshot2 [[buffer(8)]],
                     device float* snapshot3 [[buffer(9)]], device float* snapshot4 [[buffer(10)]], device float* snapshot5 [[buffer(11)]],
                     device float* snapshot6 [[buffer(12)]], device float* snapshot7 [[buffer(13)]], constant LilyGdnArgs& args [[buffer(20)]],
                     constant uint& present [[buffer(21)]], uint2 group [[threadgroup_position_in_grid]],
                     uint simd [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  const uint Dk = args.Dk, Dv = args.Dv, n = group.y, column = group.x * 32u + simd * COLUMNS, key = n / (args.Nv / args.Nk);
  if (column >= Dv) return;  // Dv is a multiple of 16: four columns are all in or all out
  const uint keys = args.Nk * Dk, C = 2u * keys + args.Nv * Dv, rows = step.rows;
  const bool live = lane * N < Dk;
  const ulong at = ulong(n) * Dk * Dv + column;

  float s[COLUMNS * N], k[N], q[N], next_k[N], next_q[N];
  load_state<N>(S_in + at, Dv, live, lane, s);
  LILY_UNROLL for (uint j = 0; j < N; j++) k[j] = q[j] = next_k[j] = next_q[j] = 0.0f;
  device const float* row = y + key * Dk;  // q, with k `keys` further
  device const float* v_row = y + 2u * keys + n * Dv + column + lane % COLUMNS;
  device const float2* gate_row = (device const float2*)gates + n;
  device float* o_row = o + n * Dv + column + lane % COLUMNS;
  float next_v = 0.0f;
  float2 next_gate = float2(0.0f);
  if (rows != 0u) {
    load_slots<N>(row, live, lane, next_q);
    load_slots<N>(row + keys, live, lane, next_k);
    next_v = v_row[0];
    next_gate = gate_row[0];
  }
  for (uint t = 0; t < rows; t++) {
    LILY_UNROLL for (uint j = 0; j < N; j++) k[j] = next_k[j], q[j] = next_q[j];
    const float v = next_v, g = next_gate.x, beta = next_gate.y;
    if (t + 1u < rows) {
      row += C;
      v_row += C;
      gate_row += args.Nv;
      load_slots<N>(row, live, lane, next_q);
      load_slots<N>(row + keys, live, lane, next_k);
      next_v = v_row[0];
      next_gate = gate_row[0];
    }
    const float sums = both_sums<N>(s, k, q, lane), kq = dk_dot<N>(k, q);
    const float mine = delta(v, sums, g, beta);  // of column l % 4, in the lanes that hold u
    const float d0 = simd_shuffle(mine, ushort(0)), d1 = simd_shuffle(mine, ushort(1)), d2 = simd_shuffle(mine, ushort(2)), d3 = simd_shuffle(mine, ushort(3));
    LILY_UNROLL for (uint j = 0; j < N; j++) {
      s[j] = updated(s[j], g, d0, k[j]);
      s[N + j] = updated(s[N + j], g, d1, k[j]);
      s[2u * N + j] = updated(s[2u * N + j], g, d2, k[j]);
      s[3u * N + j] = updated(s[3u * N + j], g, d3, k[j]);
    }
    if (lane / COLUMNS == 1u) {  // the lanes that hold p
      const uint c = lane % COLUMNS;
      *o_row = scan_output(sums, g, c == 0u ? d0 : c == 1u ? d1 : c == 2u ? d2 : d3, kq);
    }
    o_row += args.Nv * Dv;
    if (step.n_snapshots != 0u) {
      if (is_taken(step, present, 0u, t)) store_state<N>(s, Dv, live, lane, snapshot0 + at);
      if (is_taken(step, present, 1u, t)) store_state<N>(s, Dv, live, lane, snapshot1 + at);
      if (is_taken(step, present, 2u, t)) store_state<N>(s, Dv, live, lane, snapshot2 + at);
      if (is_taken(step, present, 3u, t)) store_state<N>(s, Dv, live, lane, snapshot3 + at);
      if (is_taken(step, present, 4u, t)) store_state<N>(s, Dv, live, lane, snapshot4 + at);
      if (is_taken(step, present, 5u, t)) store_state<N>(s, Dv, live, lane, snapshot5 + at);
      if (is_taken(step, present, 6u, t)) store_state<N>(s, Dv, live, lane, snapshot6 + at);
      if (is_taken(step, present, 7u, t)) store_state<N>(s, Dv, live, lane, snapshot7 + at);
    }
    if (BLOCKS && t % BLOCK == BLOCK - 1u && t + 1u < rows) {
      store_state<N>(s, Dv, live, lane, S_out + at);
      simdgroup_barrier(mem_flags::mem_device);  // or the compiler would keep the registers
      load_state<N>((device const float*)(S_out + at), Dv, live, lane, s);
    }
  }
  store_state<N>(s, Dv, live, lane, S_out + at);
}
LILY_INSTANTIATE(gdn_scan_32, gdn_scan, 1)
LILY_INSTANTIATE(gdn_scan_64, gdn_scan, 2)
LILY_INSTANTIATE(gdn_scan_128, gdn_scan, 4)
LILY_INSTANTIATE(gdn_scan_256, gdn_scan, 8)
