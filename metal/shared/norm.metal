// RMS norms and the residual stream. x = round((h * r) * weight), r = 1/sqrt(mean(h^2) + eps).
// Order of sums in reduce.h: partial sums of 16 squares, their total by lanes, as in the kernels that have a norm in front.
// A row is a threadgroup; rows past step.rows are not touched. Everything is read and written by neighbouring lanes, once.
#include "lily.h"
#include "reduce.h"

#define MAX_PARTIALS 512u  // H at most 8192

// The partial sums of squares of a row into threadgroup memory; all threads call it, a barrier must follow.
// Whole simdgroups run together, so the last one may go past the end of the row with zeros.
template <class P> inline void row_partials(P h, uint H, uint thread_index, uint threads, uint lane, threadgroup float* partials) {
  for (uint i = thread_index; i < (H + 31u) / 32u * 32u; i += threads) {
    float partial = ssq_fold(i < H ? h[i] : 0.0f);
    if (lane % LILY_SSQ_BLOCK == 0u && i < H) partials[i / LILY_SSQ_BLOCK] = partial;
  }
}

// rmsnorm_rows. step, h f32[T,H], weight f32[H] -> x act[T,H]. grid: T threadgroups of 256. The row is read twice, the second time from cache.
kernel void rmsnorm_rows(constant LilyStep& step [[buffer(0)]], device const float* h [[buffer(1)]], device const float* weight [[buffer(2)]],
                         device act* x [[buffer(3)]], constant LilyNormArgs& args [[buffer(20)]], uint t [[threadgroup_position_in_grid]],
                         uint thread_index [[thread_index_in_threadgroup]], uint threads [[threads_per_threadgroup]],
                         uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float partials[MAX_PARTIALS];
  if (t >= step.rows) return;  // all threads alike
  const uint H = args.H;
  device const float* row = h + ulong(t) * H;
  device act* out = x + ulong(t) * H;
  row_partials(row, H, thread_index, threads, lane, partials);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const float r = rms_from_total(ssq_total((threadgroup const float*)partials, H, lane), H, args.eps);
  for (uint i = thread_index; i < H; i += threads) out[i] = round_act(rms_apply(row[i], r, weight[i]));
}
LILY_INSTANTIATE(rmsnorm_rows, rmsnorm_rows)

// norm_final. h f32[H], ssq f32[H/16], weight f32[H] -> x act[H], hidden f32[H] = h (may be absent). grid: 1 threadgroup of 256
kernel void norm_final(device const float* h [[buffer(0)]], device const float* ssq [[buffer(1)]], device const float* weight [[buffer(2)]],
                       device act* x [[buffer(3)]], device float* hidden [[buffer(4)]], constant LilyNormArgs& args [[buffer(20)]],
                       constant uint& present [[buffer(21)]], uint thread_index [[thread_index_in_threadgroup]],
                       uint threads [[threads_per_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  const uint H = args.H;
  const bool copy = is_bound(present, 4u);
  const float r = rms_from_total(ssq_total(ssq, H, lane), H, args.eps);
  for (uint i = thread_index; i < H; i += threads) {
    float value = h[i];
    x[i] = round_act(rms_apply(value, r, weight[i]));
    if (copy) hidden[i] = value;
  }
}
LILY_INSTANTIATE(norm_final, norm_final)

// residual_rows. h[t] += y[t]. step, y f32[T,H], h f32[T,H]. grid: T threadgroups of 256
kernel void residual_rows(constant LilyStep& step [[buffer(0)]], device const float* y [[buffer(1)]], device float* h [[buffer(2)]],
                          constant LilyNormArgs& args [[buffer(20)]], uint t [[threadgroup_position_in_grid]],
                          uint thread_index [[thread_index_in_threadgroup]], uint threads [[threads_per_threadgroup]]) {
  if (t >= step.rows) return;
  const ulong row = ulong(t) * args.H;
  for (uint i = thread_index; i < args.H; i += threads) h[row + i] += y[row + i];
}
LILY_INSTANTIATE(residual_rows, residual_rows)

// residual_norm_rows. h[t] += y[t], x[t] = norm of h[t]. step, y f32[T,H], h f32[T,H], weight f32[H] -> x act[T,H]. grid: T threadgroups of 256
kernel void residual_norm_rows(constant LilyStep& step [[buffer(0)]], device const float* y [[buffer(1)]], device float* h [[buffer(2)]],
                               device const float* weight [[buffer(3)]], device act* x [[buffer(4)]], constant LilyNormArgs& args [[buffer(20)]],
                               uint t [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
                               uint threads [[threads_per_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float partials[MAX_PARTIALS];
  if (t >= step.rows) return;  // all threads alike
  const uint H = args.H;
  const ulong row = ulong(t) * H;
  for (uint i = thread_index; i < H; i += threads) h[row + i] += y[row + i];  // a thread meets only its own again
  row_partials((device const float*)h + row, H, thread_index, threads, lane, partials);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const float r = rms_from_total(ssq_total((threadgroup const float*)partials, H, lane), H, args.eps);
  for (uint i = thread_index; i < H; i += threads) x[row + i] = round_act(rms_apply(h[row + i], r, weight[i]));
}
LILY_INSTANTIATE(residual_norm_rows, residual_norm_rows)

// residual_step. h += y, then the partial sums of squares of h. y f32[H], h f32[H], ssq f32[H/16]. grid: 1 threadgroup of 256
// The twin of gemv_residual and moe_down in the kernel tests.
kernel void residual_step(device const float* y [[buffer(0)]], device float* h [[buffer(1)]], device float* ssq [[buffer(2)]],
                          constant LilyNormArgs& args [[buffer(20)]], uint thread_index [[thread_index_in_threadgroup]],
                          uint threads [[threads_per_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  const uint H = args.H;
  for (uint i = thread_index; i < (H + 31u) / 32u * 32u; i += threads) {
    float value = 0.0f;
    if (i < H) {
      value = h[i] + y[i];
      h[i] = value;
    }
    float partial = ssq_fold(value);
    if (lane % LILY_SSQ_BLOCK == 0u && i < H) ssq[i / LILY_SSQ_BLOCK] = partial;
  }
}
LILY_INSTANTIATE(residual_step, residual_step)
