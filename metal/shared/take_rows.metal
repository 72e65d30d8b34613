// take_rows: copies rows of h f32[T,H]: the last live one to hidden f32[H], snapshot row i to its buffer, every live one to all f32[T,H] when
// copy_all is set; an absent buffer gets nothing. grid: T threadgroups of 256, idle past step.rows.
// Bytes moved: 4H read and written for each copy; rows that nobody takes are not read.
#include "lily.h"

// A copy of one row by all threads of a threadgroup.
inline void copy_row(device const float* from, device float* to, uint H, uint thread_index, uint threads) {
  for (uint i = thread_index; i < H; i += threads) to[i] = from[i];
}

// Whether row t is the state after snapshot i, and its buffer is there.
inline bool is_taken(constant LilyStep& step, uint present, uint i, uint t) {
  return i < step.n_snapshots && step.snapshot_rows[i] == t && is_bound(present, 3u + i);
}

kernel void take_rows(constant LilyStep& step [[buffer(0)]], device const float* h [[buffer(1)]], device float* hidden [[buffer(2)]],
                      device float* snapshot0 [[buffer(3)]], device float* snapshot1 [[buffer(4)]], device float* snapshot2 [[buffer(5)]],
                      device float* snapshot3 [[buffer(6)]], device float* snapshot4 [[buffer(7)]], device float* snapshot5 [[buffer(8)]],
                      device float* snapshot6 [[buffer(9)]], device float* snapshot7 [[buffer(10)]], device float* all [[buffer(11)]],
                      constant LilyNormArgs& args [[buffer(20)]], constant uint& present [[buffer(21)]],
                      uint t [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
                      uint threads [[threads_per_threadgroup]]) {
  if (t >= step.rows) return;
  const uint H = args.H;
  device const float* row = h + ulong(t) * H;
  if (t + 1u == step.rows && is_bound(present, 2u)) copy_row(row, hidden, H, thread_index, threads);
  if (is_taken(step, present, 0u, t)) copy_row(row, snapshot0, H, thread_index, threads);
  if (is_taken(step, present, 1u, t)) copy_row(row, snapshot1, H, thread_index, threads);
  if (is_taken(step, present, 2u, t)) copy_row(row, snapshot2, H, thread_index, threads);
  if (is_taken(step, present, 3u, t)) copy_row(row, snapshot3, H, thread_index, threads);
  if (is_taken(step, present, 4u, t)) copy_row(row, snapshot4, H, thread_index, threads);
  if (is_taken(step, present, 5u, t)) copy_row(row, snapshot5, H, thread_index, threads);
  if (is_taken(step, present, 6u, t)) copy_row(row, snapshot6, H, thread_index, threads);
  if (is_taken(step, present, 7u, t)) copy_row(row, snapshot7, H, thread_index, threads);
  if (args.copy_all != 0u && is_bound(present, 11u)) copy_row(row, all + ulong(t) * H, H, thread_index, threads);
}
LILY_INSTANTIATE(take_rows, take_rows)
