// sample_draw: the alternatives, then top-k, top-p, min-p and the draw, after sample_adjust and sample_mass.
// sample (rw), y f32[V], block f32[blocks,4], hist u32[blocks,2048], mass f32[blocks,2048], list f32[V,2], counts (rw), next step (w: token).
// Greedy reads the blocks' maxima alone. top-k and alternatives find from the histogram, top-p from the mass, which first digits can matter, gather
// their candidates into `list` (V values, then V ids, in any order) in one pass over y and select there. A plain draw finds its 512 ids from
// the sums of sample_mass. The draw is the inverse of the cumulative weight in ascending order of ids, exact in integers.
// grid: 1 threadgroup of 1,024. Bytes: at most 4V read and 8 a candidate written; with sample_adjust and sample_mass logits are read three times.
#include "lily.h"
#include "sample_select.h"

// sums[digit] over the blocks, from counts or from masses; a barrier ends it.
inline void sum_digits(SelectScratch s, device const uint* hist, device const float* mass, bool by_count, uint blocks, uint thread_index) {
  for (uint d = thread_index; d < LILY_HIST_BINS; d += SELECT_THREADS) {
    ulong sum = 0ul;
    for (uint b = 0; b < blocks && d >= LOWEST_DIGIT; b++)
      sum += by_count ? ulong(hist[b * LILY_HIST_BINS + d]) : fixed_point(mass[b * LILY_HIST_BINS + d]);
    s.sums[d] = sum;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// Ids [from, to) of y with a first digit of at least `digit`; returns how many.
inline uint gather(device const float* y, uint from, uint to, uint digit, device float* values, device uint* ids, threadgroup atomic_uint* size, uint thread_index) {
  if (thread_index == 0u) atomic_store_explicit(size, 0u, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);  // the list may have served before
  for (uint i = from + thread_index; i < to; i += SELECT_THREADS) {
    float v = y[i];
    if (first_digit(v) >= digit) {
      uint at = atomic_fetch_add_explicit(size, 1u, memory_order_relaxed);
      values[at] = v;
      ids[at] = i;
    }
  }
  threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);
  return atomic_load_explicit(size, memory_order_relaxed);
}

kernel void sample_draw(device LilySample* sample [[buffer(0)]], device const float* y [[buffer(1)]], device const float* block [[buffer(2)]],
                        device const uint* hist [[buffer(3)]], device const float* mass [[buffer(4)]], device float* list [[buffer(5)]],
                        device uint* counts [[buffer(6)]], device LilyStep* next [[buffer(7)]], constant LilySampleArgs& args [[buffer(20)]],
                        constant uint& present [[buffer(21)]], uint thread_index [[thread_index_in_threadgroup]],
                        uint simd [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup atomic_uint limbs[SELECT_LIMBS * SELECT_BINS];
  threadgroup ulong sums[LILY_HIST_BINS];
  threadgroup ulong groups[32];
  threadgroup ulong left[2];
  threadgroup uint found[3];
  threadgroup atomic_uint size[1];
  threadgroup float top_values[LILY_MAX_LOGPROBS];
  threadgroup uint top_ids[LILY_MAX_LOGPROBS];
  const SelectScratch scratch = {limbs, sums, groups, left, found};
  const SamplePlan plan = sample_plan(*sample);
  const uint V = args.V, blocks = args.blocks;
  const SampleBest best = sample_best(block, blocks);
  const bool any = best.highest != minus_infinity();
  float total = 0.0f;  // of exp(y - highest)
  for (uint b = 0; b < blocks && any; b++) total += block[4u * b + 2u] * metal::exp(block[4u * b] - best.highest);
  const float log_total = any ? metal::log(total) : 0.0f;
  uint token = best.id == 0xffffffffu ? 0u : best.id;

  // Which first digits can matter.
  uint digit = LILY_HIST_BINS;
  ulong mass_need = 1ul;
  if (any && needs_histogram(plan)) {
    sum_digits(scratch, hist, mass, true, blocks, thread_index);
    walk(scratch, LILY_HIST_BINS, need_of(max(plan.alternatives, plan.top_k)), simd, lane);
    digit = found[0];
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  const uint fraction = uint(metal::clamp(sample->top_p, 0.0f, 0.99999994f) * 4294967296.0f);
  if (any && needs_mass(plan)) {
    sum_digits(scratch, hist, mass, false, blocks, thread_index);
    walk(scratch, LILY_HIST_BINS, need_share(fraction, 0ul), simd, lane);
    digit = min(digit, found[0]);
    mass_need = left[1];
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  device uint* ids = (device uint*)list + V;
  Candidates c = {list, ids, 0u};
  if (digit < LILY_HIST_BINS) c.count = gather(y, 0u, V, max(digit, LOWEST_DIGIT), list, ids, size, thread_index);

  const Cut everything = {0u, 0xffffffffu};
  Weighing weighing = {best.highest, sample->temperature, 0.0f, true};
  if (plan.alternatives != 0u) {
    uint kept = 0u;
    if (any) {
      const Cut cut = select_candidate(scratch, c, everything, weighing, need_of(plan.alternatives), false, thread_index, simd, lane);
      if (thread_index == 0u) atomic_store_explicit(size, 0u, memory_order_relaxed);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      for (uint i = thread_index; i < c.count; i += SELECT_THREADS)
        if (candidate_weight(list[i], order_key(list[i]), ids[i], cut, weighing) != 0ul) {
          uint at = atomic_fetch_add_explicit(size, 1u, memory_order_relaxed);
          top_values[at] = list[i];
          top_ids[at] = ids[i];
        }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      kept = atomic_load_explicit(size, memory_order_relaxed);
    }
    if (thread_index < plan.alternatives) {
      uint rank = thread_index, id = 0xffffffffu;
      float logprob = minus_infinity();
      if (thread_index < kept) {
        float v = top_values[thread_index];
        id = top_ids[thread_index];
        logprob = (v - best.highest) - log_total;
        rank = 0u;
        for (uint i = 0; i < kept; i++)
          if (top_values[i] > v || (top_values[i] == v && top_ids[i] < id)) rank++;
      }
      sample->top_ids[rank] = id;
      sample->top_logprobs[rank] = logprob;
    }
  }

  if (any && !plan.greedy) {
    Cut cut = everything;
    if (plan.top_k != 0u) cut = select_candidate(scratch, c, cut, weighing, need_of(plan.top_k), false, thread_index, simd, lane);
    weighing.by_count = false;
    if (plan.top_p) {
      Need need = plan.top_k != 0u ? need_share(fraction, 0ul) : need_of(mass_need);
      cut = select_candidate(scratch, c, cut, weighing, need, false, thread_index, simd, lane);
    }
    weighing.min_p = metal::min(sample->min_p, 1.0f);
    Need need = need_share(philox(sample->seed_lo, sample->seed_hi, sample->position) & 0xffffff00u, 1ul);
    if (needs_segments(plan)) {
      const uint segments = blocks * 32u, width = (segments + LILY_HIST_BINS - 1u) / LILY_HIST_BINS;
      device const uint* words = (device const uint*)mass;
      for (uint i = thread_index; i < LILY_HIST_BINS; i += SELECT_THREADS) {  // the first segments in the last bin: ids ascend
        ulong sum = 0ul;
        for (uint k = i * width; k < min((i + 1u) * width, segments); k++) {
          const uint at = k / 32u * LILY_HIST_BINS + k % 32u * 2u;
          sum += (ulong(words[at + 1u]) << 32) + ulong(words[at]);
        }
        sums[LILY_HIST_BINS - 1u - i] = sum;
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      walk(scratch, LILY_HIST_BINS, need, simd, lane);
      const uint from = (LILY_HIST_BINS - 1u - found[0]) * width * SAMPLE_SEGMENT;
      need = need_of(left[0]);
      c.count = gather(y, from, min(from + width * SAMPLE_SEGMENT, V), LOWEST_DIGIT, list, ids, size, thread_index);
    }
    token = select_candidate(scratch, c, cut, weighing, need, true, thread_index, simd, lane).id;
  }

  if (thread_index == 0u) {
    sample->token = token;
    sample->logprob = any ? (y[token] - best.highest) - log_total : minus_infinity();
    if ((sample->flags & LILY_SAMPLE_PENALTY) != 0u) counts[token] = (counts[token] + 1u) | 0x80000000u;
    if (is_bound(present, 7u)) next->token = token;
  }
}
LILY_INSTANTIATE(sample_draw, sample_draw)
