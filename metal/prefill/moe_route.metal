// Routing of a chunk: top-k per row, then the slots (row, choice) sorted by expert and, within one, by row, with the map of tiles that the
// grouped products run over. Nothing waits for the CPU: the products' grids are written here. All counts are 32 bits.
// A row's k experts are distinct, so that a block of 64 rows keeps the rows of an expert as 64 bits, and a row's place is a count of bits.
#include "lily.h"
#include "route.h"

#define BLOCK_ROWS 64u

// moe_topk_rows: ids and weights of the k experts with the largest logits, in route.h's order. step, logits f32[T,E] -> ids u32[T,k], route f32[T,k].
// grid: ceil(T/4) threadgroups of 4 simdgroups, a row each; rows past step.rows are not touched.
kernel void moe_topk_rows(constant LilyStep& step [[buffer(0)]], device const float* logits [[buffer(1)]], device uint* ids [[buffer(2)]],
                          device float* route [[buffer(3)]], constant LilyMoeRowsArgs& args [[buffer(20)]],
                          uint group [[threadgroup_position_in_grid]], uint threads [[threads_per_threadgroup]],
                          uint simd [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  const uint t = group * (threads / 32u) + simd;
  if (t >= step.rows) return;
  uint id;
  float weight;
  route_token(logits + ulong(t) * args.E, args.E, args.k, lane, id, weight);
  if (lane < args.k) {
    ids[ulong(t) * args.k + lane] = id;
    route[ulong(t) * args.k + lane] = weight;
  }
}
LILY_INSTANTIATE(moe_topk_rows, moe_topk_rows)

// Marks the rows of this block that chose each expert: bit r % 32 of rows[2 e + r / 32]. All threads call it; barriers are inside.
inline void mark_rows(device const uint* ids, uint first, uint live, uint E, uint k, uint thread_index, uint threads, threadgroup atomic_uint* rows) {
  for (uint i = thread_index; i < 2u * E; i += threads) atomic_store_explicit(rows + i, 0u, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = thread_index; i < live * k; i += threads) {
    const uint r = i / k, e = ids[ulong(first) * k + i];
    atomic_fetch_or_explicit(rows + 2u * e + r / 32u, 1u << r % 32u, memory_order_relaxed);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// moe_histogram: counts[b,e] = rows of block b that chose expert e. step, ids u32[T,k] -> counts u32[B,E], B = ceil(T/64).
// grid: B threadgroups of 256; blocks without a live row are not touched.
kernel void moe_histogram(constant LilyStep& step [[buffer(0)]], device const uint* ids [[buffer(1)]], device uint* counts [[buffer(2)]],
                          constant LilyRouteArgs& args [[buffer(20)]], uint block [[threadgroup_position_in_grid]],
                          uint thread_index [[thread_index_in_threadgroup]], uint threads [[threads_per_threadgroup]]) {
  threadgroup atomic_uint rows[2 * LILY_MAX_EXPERTS];
  const uint first = block * BLOCK_ROWS;
  if (first >= step.rows) return;
  mark_rows(ids, first, metal::min(BLOCK_ROWS, step.rows - first), args.E, args.k, thread_index, threads, rows);
  for (uint e = thread_index; e < args.E; e += threads) {
    const uint low = atomic_load_explicit(rows + 2u * e, memory_order_relaxed), high = atomic_load_explicit(rows + 2u * e + 1u, memory_order_relaxed);
    counts[ulong(block) * args.E + e] = metal::popcount(low) + metal::popcount(high);
  }
}
LILY_INSTANTIATE(moe_histogram, moe_histogram)

// The sum of `value` over the threads before this one, and over all of them. A thread a value; all threads call it; barriers are inside.
inline uint sum_before(uint value, uint simd, uint simds, uint lane, threadgroup uint* totals, thread uint& all) {
  const uint before = simd_prefix_exclusive_sum(value);
  if (lane == 31u) totals[simd] = before + value;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  uint sum = before;
  all = 0u;
  for (uint i = 0; i < simds; i++) {
    if (i < simd) sum += totals[i];
    all += totals[i];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return sum;
}

// moe_scan: offsets[e] = first slot of expert e, base[b,e] = first slot of block b's rows of expert e; tiles of at most tile_rows slots of one
// expert, in order, as (expert, first slot, rows, 0); grids = {ceil(N_a/64), tiles, 1}, {ceil(N_b/64), tiles, 1}.
// step, counts u32[B,E] -> offsets u32[E+1], base u32[B,E], tiles u32[max_tiles,4], grids u32[2,3]. grid: 1 threadgroup of 512, a thread an expert.
kernel void moe_scan(constant LilyStep& step [[buffer(0)]], device const uint* counts [[buffer(1)]], device uint* offsets [[buffer(2)]],
                     device uint* base [[buffer(3)]], device uint4* tiles [[buffer(4)]], device uint* grids [[buffer(5)]],
                     constant LilyRouteArgs& args [[buffer(20)]], uint e [[thread_index_in_threadgroup]], uint threads [[threads_per_threadgroup]],
                     uint simd [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup uint totals[32];
  const uint E = args.E, blocks = (step.rows + BLOCK_ROWS - 1u) / BLOCK_ROWS, tile_rows = args.tile_rows;
  uint rows = 0u;
  if (e < E)
    for (uint b = 0; b < blocks; b++) rows += counts[ulong(b) * E + e];
  uint slots, n_tiles;
  const uint first = sum_before(rows, simd, threads / 32u, lane, totals, slots);
  const uint first_tile = sum_before((rows + tile_rows - 1u) / tile_rows, simd, threads / 32u, lane, totals, n_tiles);
  if (e < E) {
    offsets[e] = first;
    uint slot = first;
    for (uint b = 0; b < blocks; b++) {
      base[ulong(b) * E + e] = slot;
      slot += counts[ulong(b) * E + e];
    }
    for (uint i = 0; i * tile_rows < rows; i++) tiles[first_tile + i] = uint4(e, first + i * tile_rows, metal::min(tile_rows, rows - i * tile_rows), 0u);
  }
  if (e == 0u) {
    offsets[E] = slots;
    grids[0] = (args.N_a + 63u) / 64u, grids[1] = n_tiles, grids[2] = 1u;
    grids[3] = (args.N_b + 63u) / 64u, grids[4] = n_tiles, grids[5] = 1u;
  }
}
LILY_INSTANTIATE(moe_scan, moe_scan)

// moe_scatter: the slot of choice j of row t is base[b,e] + rows before t in its block that chose the same expert.
// step, ids u32[T,k], base u32[B,E] -> slot_row u32[T*k] (row of each slot), slot_of u32[T,k]. grid: B threadgroups of 256.
kernel void moe_scatter(constant LilyStep& step [[buffer(0)]], device const uint* ids [[buffer(1)]], device const uint* base [[buffer(2)]],
                        device uint* slot_row [[buffer(3)]], device uint* slot_of [[buffer(4)]], constant LilyRouteArgs& args [[buffer(20)]],
                        uint block [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
                        uint threads [[threads_per_threadgroup]]) {
  threadgroup atomic_uint rows[2 * LILY_MAX_EXPERTS];
  const uint first = block * BLOCK_ROWS, k = args.k;
  if (first >= step.rows) return;
  const uint live = metal::min(BLOCK_ROWS, step.rows - first);
  mark_rows(ids, first, live, args.E, k, thread_index, threads, rows);
  for (uint i = thread_index; i < live * k; i += threads) {
    const uint r = i / k, e = ids[ulong(first) * k + i], below = (1u << r % 32u) - 1u;
    const uint low = atomic_load_explicit(rows + 2u * e, memory_order_relaxed), high = atomic_load_explicit(rows + 2u * e + 1u, memory_order_relaxed);
    const uint slot = base[ulong(block) * args.E + e] + (r < 32u ? metal::popcount(low & below) : metal::popcount(low) + metal::popcount(high & below));
    slot_row[slot] = first + r;
    slot_of[ulong(first) * k + i] = slot;
  }
}
LILY_INSTANTIATE(moe_scatter, moe_scatter)
