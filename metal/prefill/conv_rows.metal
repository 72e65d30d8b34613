// conv_rows: y[t,c] = silu(sum over j of w[j,c] qkv[t-3+j,c]), taps oldest first; rows before the chunk come from the stored state.
// step, qkv f32[T,ld] (rounded), conv_w f32[4,C], conv_in act[3,C] -> conv_out act[3,C] (the last three rows), y f32[T,C], and the three
// rows that end with each snapshot row. C = 2*Nk*Dk + Nv*Dv. grid: ceil(C/128) x ceil(T/16) threadgroups of 128, idle past step.rows.
// A thread owns a channel and 16 rows, with the three rows before its own in registers. Bytes moved: qkv 19/16 times, y once.
#include "lily.h"
#include "gdn.h"

#define ROWS 16  // of a threadgroup

// One channel of the chunk and of the state before it.
struct Channel {
  device const float* qkv;
  device const act* before;
  uint ld, C;
};
inline float input(thread const Channel& x, int t) { return t < 0 ? act_value(x.before[ulong(t + 3) * x.C]) : x.qkv[ulong(t) * x.ld]; }

// The three rows that end with row `last`, oldest first.
inline void store_conv(thread const Channel& x, int last, device act* out) {
  for (int j = 0; j < 3; j++) out[ulong(j) * x.C] = round_act(input(x, last - 2 + j));
}

// Whether this threadgroup stores snapshot i: the row lies in its rows and the buffer is there.
inline bool is_stored(constant LilyStep& step, uint present, uint i, uint first) {
  return i < step.n_snapshots && step.snapshot_rows[i] < step.rows && step.snapshot_rows[i] / ROWS * ROWS == first && is_bound(present, 6u + i);
}

kernel void conv_rows(constant LilyStep& step [[buffer(0)]], device const float* qkv [[buffer(1)]], device const float* conv_w [[buffer(2)]],
                      device const act* conv_in [[buffer(3)]], device act* conv_out [[buffer(4)]], device float* y [[buffer(5)]],
                      device act* snapshot0 [[buffer(6)]], device act* snapshot1 [[buffer(7)]], device act* snapshot2 [[buffer(8)]],
                      device act* snapshot3 [[buffer(9)]], device act* snapshot4 [[buffer(10)]], device act* snapshot5 [[buffer(11)]],
                      device act* snapshot6 [[buffer(12)]], device act* snapshot7 [[buffer(13)]], constant LilyGdnArgs& args [[buffer(20)]],
                      constant uint& present [[buffer(21)]], uint2 group [[threadgroup_position_in_grid]],
                      uint thread_index [[thread_index_in_threadgroup]], uint threads [[threads_per_threadgroup]]) {
  const uint C = 2u * args.Nk * args.Dk + args.Nv * args.Dv, c = group.x * threads + thread_index, first = group.y * ROWS;
  const uint rows = step.rows, end = metal::min(first + ROWS, rows);
  if (c >= C || (first >= rows && first != 0u)) return;
  Channel x = {qkv + c, conv_in + c, args.ld_qkv, C};
  const float w0 = conv_w[c], w1 = conv_w[C + c], w2 = conv_w[2u * C + c], w3 = conv_w[3u * C + c];
  float x0 = input(x, int(first) - 3), x1 = input(x, int(first) - 2), x2 = input(x, int(first) - 1);
  for (uint t = first; t < end; t++) {
    const float now = input(x, int(t));
    y[ulong(t) * C + c] = conv_silu(w0, w1, w2, w3, x0, x1, x2, now);
    x0 = x1, x1 = x2, x2 = now;
  }
  if (first + ROWS >= rows) store_conv(x, int(rows) - 1, conv_out + c);
  if (is_stored(step, present, 0u, first)) store_conv(x, int(step.snapshot_rows[0]), snapshot0 + c);
  if (is_stored(step, present, 1u, first)) store_conv(x, int(step.snapshot_rows[1]), snapshot1 + c);
  if (is_stored(step, present, 2u, first)) store_conv(x, int(step.snapshot_rows[2]), snapshot2 + c);
  if (is_stored(step, present, 3u, first)) store_conv(x, int(step.snapshot_rows[3]), snapshot3 + c);
  if (is_stored(step, present, 4u, first)) store_conv(x, int(step.snapshot_rows[4]), snapshot4 + c);
  if (is_stored(step, present, 5u, first)) store_conv(x, int(step.snapshot_rows[5]), snapshot5 + c);
  if (is_stored(step, present, 6u, first)) store_conv(x, int(step.snapshot_rows[6]), snapshot6 + c);
  if (is_stored(step, present, 7u, first)) store_conv(x, int(step.snapshot_rows[7]), snapshot7 + c);
}
LILY_INSTANTIATE(conv_rows, conv_rows)
