// Sampling without a sort, and scoring: every threadgroup has 1,024 threads.
// Order: penalties, bias, mask -> y (logprobs are of softmax(y)); then temperature, top-k, top-p, min-p, one Philox uniform.
// Sums of exp: a thread's 16 values in order, lanes and then simdgroups by lane_sum.
#include "lily.h"
#include "sample.h"

#define THREADS 1024u
#define EACH 16u  // values of a thread of a block

// One adjusted logit. y > 0 ? y/r : y*r for a token of the session, then frequency and presence by its count in the output.
inline float penalise(device const LilySample& s, float y, uint count) {
  if (count == 0u) return y;
  y = y > 0.0f ? y / s.repetition_penalty : y * s.repetition_penalty;
  uint times = count & 0x7fffffffu;
  y -= s.frequency_penalty * float(times);
  return times != 0u ? y - s.presence_penalty : y;
}

// sample_adjust. y = the adjusted logits: NaN becomes -inf, +inf the largest float, -0 becomes +0. Per block of 16,384: the maximum, its lowest id
// (of the lowest allowed id when all are -inf), sum(exp(y - max)); with top-k or alternatives the histogram of first digits.
// sample, logits f32[V], counts u32[V], bias f32[V], mask u32[V/32] -> y f32[V], block f32[blocks,4], hist u32[blocks,2048].
// grid: V/16384. Bytes: 4V read (8V with counts, 12V with bias), 4V written; y stays in registers for the sum.
kernel void sample_adjust(device const LilySample* sample [[buffer(0)]], device const float* logits [[buffer(1)]], device const uint* counts [[buffer(2)]],
                          device const float* bias [[buffer(3)]], device const uint* mask [[buffer(4)]], device float* y [[buffer(5)]],
                          device float* block [[buffer(6)]], device uint* hist [[buffer(7)]], constant LilySampleArgs& args [[buffer(20)]],
                          uint b [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
                          uint simd [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup atomic_uint bins[LILY_HIST_BINS];
  threadgroup float floats[64];
  threadgroup uint ids[64];
  device const LilySample& s = *sample;
  const uint flags = s.flags, from = b * LILY_SAMPLE_BLOCK;
  const bool counting = needs_histogram(sample_plan(s));
  if (counting)
    for (uint i = thread_index; i < LILY_HIST_BINS; i += THREADS) atomic_store_explicit(&bins[i], 0u, memory_order_relaxed);
  float values[EACH];
  float own = minus_infinity();
  uint allowed_id = 0xffffffffu;
  LILY_UNROLL for (uint i = 0; i < EACH; i++) {
    const uint id = from + i * THREADS + thread_index;
    values[i] = minus_infinity();
    if (id < args.V) {
      float v = logits[id];
      if ((flags & LILY_SAMPLE_PENALTY) != 0u) v = penalise(s, v, counts[id]);
      if ((flags & LILY_SAMPLE_BIAS) != 0u) v += bias[id];
      bool allowed = true;
      if ((flags & LILY_SAMPLE_MASK) != 0u) allowed = (mask[id / 32u] >> (id % 32u) & 1u) != 0u;
      if (!allowed || v != v) v = minus_infinity();
      v = metal::min(v, 3.40282347e+38f) + 0.0f;
      y[id] = v;
      values[i] = v;
      own = metal::max(own, v);
      if (allowed) allowed_id = min(allowed_id, id);
    }
  }
  const float highest = threadgroup_max(own, simd, lane, floats);  // its barrier also follows the zeroing of bins
  uint at = 0xffffffffu;
  float sum = 0.0f;
  LILY_UNROLL for (uint i = 0; i < EACH; i++) {
    const uint id = from + i * THREADS + thread_index;
    if (id < args.V) {
      if (values[i] == highest) at = min(at, id);
      if (highest != minus_infinity()) sum += metal::exp(values[i] - highest);
      if (counting) atomic_fetch_add_explicit(&bins[first_digit(values[i])], 1u, memory_order_relaxed);
    }
  }
  const uint first = threadgroup_min(highest == minus_infinity() ? allowed_id : at, simd, lane, ids);
  const float total = threadgroup_sum(sum, simd, lane, floats + 32);
  if (thread_index == 0u) {
    block[4u * b] = highest;
    block[4u * b + 1u] = as_type<float>(first);
    block[4u * b + 2u] = total;
    block[4u * b + 3u] = 0.0f;
  }
  if (counting)
    for (uint i = thread_index; i < LILY_HIST_BINS; i += THREADS) hist[b * LILY_HIST_BINS + i] = atomic_load_explicit(&bins[i], memory_order_relaxed);
}
LILY_INSTANTIATE(sample_adjust, sample_adjust)

// sample_mass. With top-p and no top-k: mass[b][digit] = sum of exp((y - M)/T) over the block's y of this first digit, as f32. For a plain draw:
// the sums of 32 segments of 512 ids (0 below min_p), as 64-bit integers in units of 2^-44, in the first 64 words. Otherwise idle.
// sample, y f32[V], block -> mass f32[blocks,2048]. grid: V/16384. Bytes: 4V read.
// Weights are cut into three limbs of 16 bits for threadgroup atomics: sums of integers have no order.
kernel void sample_mass(device const LilySample* sample [[buffer(0)]], device const float* y [[buffer(1)]], device const float* block [[buffer(2)]],
                        device float* mass [[buffer(3)]], constant LilySampleArgs& args [[buffer(20)]], uint b [[threadgroup_position_in_grid]],
                        uint thread_index [[thread_index_in_threadgroup]], uint simd [[simdgroup_index_in_threadgroup]],
                        uint lane [[thread_index_in_simdgroup]]) {
  threadgroup atomic_uint limbs[3 * LILY_HIST_BINS];
  device const LilySample& s = *sample;
  const SamplePlan plan = sample_plan(s);
  const float highest = sample_best(block, args.blocks).highest;
  const uint from = b * LILY_SAMPLE_BLOCK;
  device uint* words = (device uint*)mass + b * LILY_HIST_BINS;
  if (highest != minus_infinity() && needs_mass(plan)) {
    for (uint i = thread_index; i < 3u * LILY_HIST_BINS; i += THREADS) atomic_store_explicit(&limbs[i], 0u, memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint id = from + thread_index; id < min(from + LILY_SAMPLE_BLOCK, args.V); id += THREADS) {
      float v = y[id];
      ulong w = fixed_point(sample_weight(v, highest, s.temperature, 0.0f)) << 4;  // units of 2^-48
      uint digit = first_digit(v);
      if (w != 0ul) {
        atomic_fetch_add_explicit(&limbs[digit], uint(w >> 32), memory_order_relaxed);
        atomic_fetch_add_explicit(&limbs[LILY_HIST_BINS + digit], uint(w >> 16) & 0xffffu, memory_order_relaxed);
        atomic_fetch_add_explicit(&limbs[2u * LILY_HIST_BINS + digit], uint(w) & 0xffffu, memory_order_relaxed);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = thread_index; i < LILY_HIST_BINS; i += THREADS) {
      ulong sum = (ulong(atomic_load_explicit(&limbs[i], memory_order_relaxed)) << 32) +
                  (ulong(atomic_load_explicit(&limbs[LILY_HIST_BINS + i], memory_order_relaxed)) << 16) +
                  ulong(atomic_load_explicit(&limbs[2u * LILY_HIST_BINS + i], memory_order_relaxed));
      mass[b * LILY_HIST_BINS + i] = float(uint(sum >> 32)) * (1.0f / 65536.0f) + float(uint(sum)) * (1.0f / 281474976710656.0f);
    }
  }
  if (highest != minus_infinity() && needs_segments(plan)) {
    const float min_p = metal::min(s.min_p, 1.0f);
    uint low = 0u, middle = 0u, high = 0u;  // 16 values of 45 bits, lanes summed limb by limb
    LILY_UNROLL for (uint i = 0; i < EACH; i++) {
      const uint id = from + simd * SAMPLE_SEGMENT + i * 32u + lane;
      if (id < args.V) {
        ulong w = fixed_point(sample_weight(y[id], highest, s.temperature, min_p));
        low += uint(w) & 0xffffu;
        middle += uint(w >> 16) & 0xffffu;
        high += uint(w >> 32);
      }
    }
    const ulong sum = (ulong(simd_sum(high)) << 32) + (ulong(simd_sum(middle)) << 16) + ulong(simd_sum(low));
    if (lane == 0u) {
      words[2u * simd] = uint(sum);
      words[2u * simd + 1u] = uint(sum >> 32);
    }
  }
}
LILY_INSTANTIATE(sample_mass, sample_mass)

// score_rows. out[r] = logits[r][target] - log(sum(exp(logits[r]))), 0 where the target is negative. step, logits f32[64,V], targets i32[64]
// -> out f32[64]. grid: 64, idle past step.rows. Bytes: the row twice. A thread adds 16 values at a time, then these sums.
kernel void score_rows(constant LilyStep& step [[buffer(0)]], device const float* logits [[buffer(1)]], device const int* targets [[buffer(2)]],
                       device float* out [[buffer(3)]], constant LilySampleArgs& args [[buffer(20)]], uint r [[threadgroup_position_in_grid]],
                       uint thread_index [[thread_index_in_threadgroup]], uint simd [[simdgroup_index_in_threadgroup]],
                       uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float scratch[64];
  if (r < step.rows) {
    const int target = targets[r];
    device const float* x = logits + ulong(r) * args.V;
    if (target >= 0) {
      float own = minus_infinity();
      for (uint i = thread_index; i < args.V; i += THREADS) own = metal::max(own, x[i]);
      const float highest = threadgroup_max(own, simd, lane, scratch);
      float total = 0.0f;
      for (uint i = thread_index; i < args.V; i += EACH * THREADS) {
        float sum = 0.0f;
        for (uint k = i; k < min(i + EACH * THREADS, args.V); k += THREADS) sum += metal::exp(x[k] - highest);
        total += sum;
      }
      total = threadgroup_sum(total, simd, lane, scratch + 32);
      if (thread_index == 0u) out[r] = (x[target] - highest) - metal::log(total);
    } else if (thread_index == 0u) {
      out[r] = 0.0f;
    }
  }
}
LILY_INSTANTIATE(score_rows, score_rows)
