// What attn_split and attn_split_long share: scores, online softmax and values of a split's keys by eight simdgroups, and their join.
// Layouts and order of sums in attn_split.metal.
#ifndef LILY_ATTN_SPLIT_H
#define LILY_ATTN_SPLIT_H
#include "attn.h"

#define SIMDGROUPS 8u
#define STEP_KEYS 32u

struct SplitBounds {
  uint first, end;  // keys
};

// DIMS neighbours of a row from element `at` on.
template <uint DIMS> inline void load_dims(device const act* row, uint at, thread float* v) {
#ifdef LILY_STORAGE_FLOAT32
  LILY_UNROLL for (uint i = 0; i < DIMS; i++) v[i] = row[at + i];
#else
  device const act* from = row + at;
  uint words[DIMS / 2];
  if (DIMS == 8u) {
    uint4 w = *(device const uint4*)from;
    LILY_UNROLL for (uint i = 0; i < DIMS / 2u; i++) words[i] = w[i & 3u];
  } else if (DIMS == 4u) {
    uint2 w = *(device const uint2*)from;
    LILY_UNROLL for (uint i = 0; i < DIMS / 2u; i++) words[i] = w[i & 1u];
  } else {
    words[0] = *(device const uint*)from;
  }
  LILY_UNROLL for (uint i = 0; i < DIMS; i += 2u) {
    v[i] = as_type<float>(words[i / 2u] << 16);
    v[i + 1u] = as_type<float>(words[i / 2u] & 0xffff0000u);
  }
#endif
}

// This lane's first element. Where D is not 32 DIMS the last lanes read the end of a row once more; their query is zero and nobody takes their output.
template <uint DIMS> inline uint first_dim(uint D, uint lane) { return metal::min(lane * DIMS, D - DIMS); }

// Eight values of each lane, one a key, already summed over neighbourhoods of four lanes: lane l gets the total of key l / 4.
inline float fold_keys(thread const float* x, uint lane) {
  const bool a = (lane & 4u) != 0u, b = (lane & 8u) != 0u, c = (lane & 16u) != 0u;
  float y[4], z[2];
  LILY_UNROLL for (uint i = 0; i < 4u; i++) y[i] = (a ? x[2u * i + 1u] : x[2u * i]) + simd_shuffle_xor(a ? x[2u * i] : x[2u * i + 1u], ushort(4));
  LILY_UNROLL for (uint i = 0; i < 2u; i++) z[i] = (b ? y[2u * i + 1u] : y[2u * i]) + simd_shuffle_xor(b ? y[2u * i] : y[2u * i + 1u], ushort(8));
  return (c ? z[1] : z[0]) + simd_shuffle_xor(c ? z[0] : z[1], ushort(16));
}

// What a simdgroup knows of its keys. m and l of head h lie in the lanes l with l % 4 == h (HEADS = 1: in all).
template <uint HEADS, uint DIMS> struct Softmax {
  float o[HEADS * DIMS];
  float m, l;
};

// Scores of keys 0 .. n - 1 (n from 1 to 32) of rows `keys`: s[i] is key 8 i + lane / 4 of head lane % 4, -inf past the end.
template <uint HEADS, uint DIMS> inline void score(thread const float* q, device const act* keys, uint n, uint D, float scale, uint lane, thread float* s) {
  const uint at = first_dim<DIMS>(D, lane);
  LILY_UNROLL for (uint i = 0; i < 4u; i++) {
    s[i] = minus_infinity();
    if (8u * i < n) {
      float part[8];
      LILY_UNROLL for (uint k = 0; k < 8u; k++) {
        float row[DIMS], dot[4];
        load_dims<DIMS>(keys + ulong(metal::min(8u * i + k, n - 1u)) * D, at, row);  // past the end: the last key again, masked below
        LILY_UNROLL for (uint h = 0; h < 4u; h++) {
          dot[h] = 0.0f;
          if (h < HEADS) LILY_UNROLL for (uint d = 0; d < DIMS; d++) dot[h] = metal::fma(q[(h % HEADS) * DIMS + d], row[d], dot[h]);
        }
        if (HEADS == 1u) {
          dot[0] += simd_shuffle_xor(dot[0], ushort(1));
          part[k] = dot[0] + simd_shuffle_xor(dot[0], ushort(2));
        } else {
          part[k] = fold_quad(dot[0], dot[1], dot[2], dot[3], lane);
        }
      }
      float sum = fold_keys(part, lane) * scale;
      if (8u * i + lane / 4u < n) s[i] = sum;
    }
  }
}

inline float max_of_keys(thread const float* s) {
  float x = metal::max(metal::max(s[0], s[1]), metal::max(s[2], s[3]));
  x = metal::max(x, simd_shuffle_xor(x, ushort(4)));
  x = metal::max(x, simd_shuffle_xor(x, ushort(8)));
  return metal::max(x, simd_shuffle_xor(x, ushort(16)));
}

// Adds the keys of score() and their rows of `values`, with m the maximum to round against.
template <uint HEADS, uint DIMS>
inline void accumulate(thread Softmax<HEADS, DIMS>& x, thread float* s, float m, device const act* values, uint n, uint D, uint lane) {
  const uint at = first_dim<DIMS>(D, lane);
  const float decay = metal::exp(x.m - m);
  LILY_UNROLL for (uint i = 0; i < 4u; i++) s[i] = metal::exp(s[i] - m);
  float sum = ((s[0] + s[1]) + s[2]) + s[3];
  sum += simd_shuffle_xor(sum, ushort(4));
  sum += simd_shuffle_xor(sum, ushort(8));
  sum += simd_shuffle_xor(sum, ushort(16));
  x.l = metal::fma(x.l, decay, sum);
  x.m = m;
  LILY_UNROLL for (uint h = 0; h < HEADS; h++) {
    float d = simd_shuffle(decay, ushort(h));
    LILY_UNROLL for (uint j = 0; j < DIMS; j++) x.o[h * DIMS + j] *= d;
  }
  LILY_UNROLL for (uint i = 0; i < 4u; i++) {
    float p = rounded(s[i]);
    if (8u * i < n) {
      LILY_UNROLL for (uint k = 0; k < 8u; k++) {
        float row[DIMS];
        load_dims<DIMS>(values + ulong(metal::min(8u * i + k, n - 1u)) * D, at, row);  // past the end: p is zero
        LILY_UNROLL for (uint h = 0; h < HEADS; h++) {
          float weight = simd_shuffle(p, ushort(4u * k + h));
          LILY_UNROLL for (uint j = 0; j < DIMS; j++) x.o[h * DIMS + j] = metal::fma(weight, row[j], x.o[h * DIMS + j]);
        }
      }
    }
  }
}

// All keys in [bounds.first, bounds.end), by the eight simdgroups of a set of heads; `heads` of HEADS are real. All threads of the threadgroup
// call it together. maxima: 2 * 8 * 4 floats of this set, used by turns so that one barrier is enough.
template <uint HEADS, uint DIMS>
inline void attend(thread Softmax<HEADS, DIMS>& x, constant LilyAttnArgs& args, device const act* q, device const uint* table, device const act* K, device const act* V,
                   SplitBounds bounds, uint kv, uint heads, uint s, uint lane, threadgroup float* maxima) {
  float query[HEADS * DIMS];
  LILY_UNROLL for (uint h = 0; h < HEADS; h++) load_dims<DIMS>(q + metal::min(h, heads - 1u) * args.D, first_dim<DIMS>(args.D, lane), query + h * DIMS);
  LILY_UNROLL for (uint i = 0; i < HEADS * DIMS; i++) query[i] = lane * DIMS < args.D ? query[i] : 0.0f;
  LILY_UNROLL for (uint i = 0; i < HEADS * DIMS; i++) x.o[i] = 0.0f;
  x.m = minus_infinity();
  x.l = 0.0f;
  float before = minus_infinity();  // maximum over the blocks of 256 so far
  for (uint base = bounds.first; base < bounds.end; base += LILY_KV_BLOCK) {
    const ulong at = arena_offset(args, table, base, kv) + s * STEP_KEYS * args.D;
    const uint left = bounds.end - base, n = left > s * STEP_KEYS ? metal::min(STEP_KEYS, left - s * STEP_KEYS) : 0u;
    threadgroup float* turn = maxima + ((base / LILY_KV_BLOCK) & 1u) * SIMDGROUPS * 4u;
    float scores[4];
    float own = minus_infinity();
    if (n != 0u) {
      score<HEADS, DIMS>(query, K + at, n, args.D, args.scale, lane, scores);
      own = max_of_keys(scores);
    }
    if (lane < 4u) turn[4u * s + lane] = own;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float m = before;
    for (uint i = 0; i < SIMDGROUPS; i++) {
      before = metal::max(before, turn[4u * i + lane % 4u]);
      if (i == (s | 1u)) m = before;  // two simdgroups make a block of 64
    }
    if (n != 0u) accumulate<HEADS, DIMS>(x, scores, m, V + at, n, args.D, lane);
  }
}

// Joins the eight simdgroups of one set of heads; `mine`: this simdgroup belongs to it. All threads of the threadgroup call it together.
// part: 4 * HEADS * DIMS * 32 floats. ml: 8 * 4 * 2. o and ml_out: of the set's first head in this split.
template <uint HEADS, uint DIMS>
inline void join(thread Softmax<HEADS, DIMS>& x, bool mine, uint heads, uint D, uint s, uint lane, threadgroup float* part, threadgroup float* ml, device float* o,
                 device float* ml_out) {
  if (mine && lane < 4u) ml[8u * s + 2u * lane] = x.m, ml[8u * s + 2u * lane + 1u] = x.l;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint h0 = lane % 4u;
  float highest = ml[2u * h0];
  for (uint i = 1; i < SIMDGROUPS; i++) highest = metal::max(highest, ml[8u * i + 2u * h0]);
  float total = 0.0f;
  for (uint i = 0; i < SIMDGROUPS; i++) total = metal::fma(metal::exp(ml[8u * i + 2u * h0] - highest), ml[8u * i + 2u * h0 + 1u], total);
  const float factor = metal::exp(x.m - highest);
  if (mine) {
    LILY_UNROLL for (uint h = 0; h < HEADS; h++) {
      float f = simd_shuffle(factor, ushort(h));
      LILY_UNROLL for (uint j = 0; j < DIMS; j++) x.o[h * DIMS + j] *= f;
    }
  }
  for (uint half_count = SIMDGROUPS / 2u; half_count != 0u; half_count /= 2u) {
    if (mine && s >= half_count && s < 2u * half_count) {
      threadgroup float* to = part + (s - half_count) * HEADS * DIMS * 32u;
      LILY_UNROLL for (uint i = 0; i < HEADS * DIMS; i++) to[i * 32u + lane] = x.o[i];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (mine && s < half_count) {
      threadgroup const float* from = part + s * HEADS * DIMS * 32u;
      LILY_UNROLL for (uint i = 0; i < HEADS * DIMS; i++) x.o[i] += from[i * 32u + lane];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  if (mine && s == 0u) {
    if (lane * DIMS < D) {
      LILY_UNROLL for (uint h = 0; h < HEADS; h++)
        if (h < heads) LILY_UNROLL for (uint j = 0; j < DIMS; j++) o[h * D + lane * DIMS + j] = x.o[h * DIMS + j];
    }
    if (lane < heads) ml_out[2u * lane] = highest, ml_out[2u * lane + 1u] = total;
  }
}

#endif
