// Radix selection over a list of candidates by one threadgroup of 1,024 threads, without a sort. A candidate is the word (key of its value,
// 2^24 - 1 - id): larger value first, then lower id. All sums are integers, so neither the list's order nor the threads' matters.
// A digit takes 8 bits: a histogram in threadgroup memory, then a walk from the top to where `need` is reached. At most seven digits,
// and no more once the candidate is alone.
#ifndef LILY_SAMPLE_SELECT_H
#define LILY_SAMPLE_SELECT_H
#include "sample.h"

#define SELECT_THREADS 1024u
#define SELECT_BINS 256u
#define SELECT_LIMBS 5u  // four of 11 bits, whose sums over 2^20 candidates fit 32, and the number of candidates
#define ID_MASK 0xffffffu

struct SelectScratch {
  threadgroup atomic_uint* limbs;   // SELECT_LIMBS * SELECT_BINS
  threadgroup ulong* sums;          // LILY_HIST_BINS
  threadgroup ulong* groups;        // 32
  threadgroup ulong* left;          // of the walk: what is still needed inside of the bin; need
  threadgroup uint* found;          // of the walk: bin; of a selection: candidates in the bin, key, id
};

// How much of a sum is looked for: `amount`, or a fraction of the total in units of 2^-32 plus `amount`. At least 1, at most the total.
struct Need {
  ulong amount;
  uint fraction;
  bool relative;
};
inline Need need_of(ulong amount) {
  Need n = {amount, 0u, false};
  return n;
}
inline Need need_share(uint fraction, ulong amount) {
  Need n = {amount, fraction, true};
  return n;
}

// From the highest of `bins` sums down to the one where `need` is reached: found[0], left[0], left[1] = the need in absolute terms.
// All threads call it, with the sums written before a barrier; the result is there when it returns.
inline void walk(SelectScratch s, uint bins, Need need, uint simd, uint lane) {
  if (simd == 0u) {
    const uint width = bins / 32u, top = bins - lane * width;  // this lane: bins top - width .. top - 1
    ulong own = 0ul;
    for (uint i = 0; i < width; i++) own += s.sums[top - width + i];
    s.groups[lane] = own;
    simdgroup_barrier(mem_flags::mem_threadgroup);
    ulong before = 0ul, total = 0ul;
    for (uint i = 0; i < 32u; i++) {
      if (i < lane) before += s.groups[i];
      total += s.groups[i];
    }
    ulong wanted = need.amount;
    if (need.relative) wanted += share_of(total, need.fraction);
    if (wanted > total) wanted = total;
    if (wanted == 0ul) wanted = 1ul;
    if (before < wanted && before + own >= wanted) {
      uint at = top - 1u;
      ulong sum = before;
      for (uint i = 0; i < width && sum + s.sums[at] < wanted; i++) sum += s.sums[at--];
      s.found[0] = at;
      s.left[0] = wanted - sum;
      s.left[1] = wanted;
    }
    if (total == 0ul && lane == 0u) s.found[0] = 0u, s.left[0] = s.left[1] = 1ul;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

struct Candidates {
  device const float* values;
  device const uint* ids;
  uint count;
};

// The last candidate that is kept, in the order of the word.
struct Cut {
  uint key, id;
};

struct Weighing {
  float highest, temperature, min_p;
  bool by_count;  // every candidate counts 1
};

// What a candidate brings into a selection: 0 outside of the cut.
inline ulong candidate_weight(float v, uint key, uint id, Cut cut, Weighing w) {
  if (key < cut.key || (key == cut.key && id > cut.id)) return 0ul;
  return w.by_count ? 1ul : fixed_point(sample_weight(v, w.highest, w.temperature, w.min_p));
}

// Whether the first `digits` digits of two words agree.
inline bool same_prefix(uint key, uint rest, uint other_key, uint other_rest, uint digits) {
  if (digits == 0u) return true;
  if (digits <= 4u) return (key ^ other_key) >> (32u - 8u * digits) == 0u;
  return key == other_key && (rest ^ other_rest) >> (24u - 8u * (digits - 4u)) == 0u;
}

// The candidate at which the sum of weights, from the first in order, reaches `need`. by_id: in ascending order of ids alone.
inline Cut select_candidate(SelectScratch s, Candidates c, Cut cut, Weighing weighing, Need need, bool by_id, uint thread_index, uint simd, uint lane) {
  uint key = 0u, rest = 0u, digits = by_id ? 4u : 0u;
  bool alone = false;
  while (digits < 7u && !alone) {
    for (uint i = thread_index; i < SELECT_LIMBS * SELECT_BINS; i += SELECT_THREADS) atomic_store_explicit(&s.limbs[i], 0u, memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = thread_index; i < c.count; i += SELECT_THREADS) {
      const float v = c.values[i];
      const uint id = c.ids[i], own = order_key(v), word = by_id ? 0u : own;
      const ulong w = candidate_weight(v, own, id, cut, weighing);
      if (w != 0ul && same_prefix(word, ID_MASK - id, key, rest, digits)) {
        uint bin = digits < 4u ? word >> (24u - 8u * digits) & 255u : (ID_MASK - id) >> (16u - 8u * (digits - 4u)) & 255u;
        LILY_UNROLL for (uint j = 0; j < 4u; j++) {
          uint limb = uint(w >> (11u * j)) & (j == 3u ? 4095u : 2047u);
          if (limb != 0u) atomic_fetch_add_explicit(&s.limbs[j * SELECT_BINS + bin], limb, memory_order_relaxed);
        }
        atomic_fetch_add_explicit(&s.limbs[4u * SELECT_BINS + bin], 1u, memory_order_relaxed);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (thread_index < SELECT_BINS) {
      ulong sum = 0ul;
      for (uint j = 0; j < 4u; j++) sum += ulong(atomic_load_explicit(&s.limbs[j * SELECT_BINS + thread_index], memory_order_relaxed)) << (11u * j);
      s.sums[thread_index] = sum;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    walk(s, SELECT_BINS, need, simd, lane);
    const uint bin = s.found[0];
    alone = atomic_load_explicit(&s.limbs[4u * SELECT_BINS + bin], memory_order_relaxed) == 1u;
    need = need_of(s.left[0]);
    if (digits < 4u) key |= bin << (24u - 8u * digits);
    else rest |= bin << (16u - 8u * (digits - 4u));
    digits++;
    threadgroup_barrier(mem_flags::mem_threadgroup);  // everyone has read before the next digit writes
  }
  for (uint i = thread_index; i < c.count; i += SELECT_THREADS) {
    const float v = c.values[i];
    const uint id = c.ids[i], own = order_key(v), word = by_id ? 0u : own;
    if (candidate_weight(v, own, id, cut, weighing) != 0ul && same_prefix(word, ID_MASK - id, key, rest, digits)) s.found[1] = own, s.found[2] = id;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  Cut result = {s.found[1], s.found[2]};
  return result;
}

#endif
