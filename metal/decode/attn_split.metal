// attn_split: softmax over a split's keys, not divided: o = sum(round(p) * V), ml = (max, sum of p). step, q act[Hq,D], table, K and V arenas
// -> o f32[splits,Hq,D], ml f32[splits,Hq,2]. A split past the last key: ml = (-inf, 0), o untouched.
// A threadgroup is one kv head, one split and HEADS query heads, which share each K and V row: it is read once, into registers, by whole lines
// (D = 256: 16 bytes a lane). grid: heads of a kv head / HEADS (fastest), Hkv, splits. 8 simdgroups: simdgroup s takes keys 32 s .. 32 s + 31
// of every block of 256; their results are joined in threadgroup memory.
// Bytes moved: each K and V row of the split once per HEADS query heads. LILY_KERNEL=attn_split=one_head: HEADS = 1, output in the same bits.
// attn_split_long: for long contexts of D = 256 and 8 query heads a kv head. 64 splits that share the context's own blocks evenly, where attn_split
// cuts the capacity it was recorded for; two sets of 8 simdgroups take 4 heads each of the same keys. grid: Hkv (fastest), 64 splits.
// Order of sums (contract: it depends on positions and the split's bounds alone): a score is DIMS products by fma in a lane, then lane_sum;
// online softmax in steps of 32 keys at absolute multiples, p of 8 keys apart added in order, then keys as lane_sum adds lanes;
// o by fma over keys ascending; simdgroups joined as s + (s + 4), + 2, + 1; sums of p over simdgroups ascending.
#include "lily.h"
#include "attn.h"

#define SIMDGROUPS 8u
#define STEP_KEYS 32u

struct SplitBounds {
  uint first, end;  // keys
};

// DIMS neighbours of a row, this lane's; zero past its end.
template <uint DIMS> inline void load_dims(device const act* row, uint D, uint lane, thread float* v) {
  LILY_UNROLL for (uint i = 0; i < DIMS; i++) v[i] = 0.0f;
  if (lane * DIMS < D) {
    device const act* at = row + lane * DIMS;
#ifdef LILY_STORAGE_FLOAT32
    LILY_UNROLL for (uint i = 0; i < DIMS; i++) v[i] = at[i];
#else
    uint words[DIMS / 2];
    if (DIMS == 8u) {
      uint4 w = *(device const uint4*)at;
      LILY_UNROLL for (uint i = 0; i < DIMS / 2u; i++) words[i] = w[i & 3u];
    } else if (DIMS == 4u) {
      uint2 w = *(device const uint2*)at;
      LILY_UNROLL for (uint i = 0; i < DIMS / 2u; i++) words[i] = w[i & 1u];
    } else {
      words[0] = *(device const uint*)at;
    }
    LILY_UNROLL for (uint i = 0; i < DIMS; i += 2u) {
      v[i] = as_type<float>(words[i / 2u] << 16);
      v[i + 1u] = as_type<float>(words[i / 2u] & 0xffff0000u);
    }
#endif
  }
}

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

// One step: keys base .. base + n - 1, n from 1 to 32, of rows `keys` and `values`.
template <uint HEADS, uint DIMS>
inline void attend(thread Softmax<HEADS, DIMS>& x, thread const float* q, device const act* keys, device const act* values, uint n, uint D, float scale, uint lane) {
  float s[4];
  LILY_UNROLL for (uint i = 0; i < 4u; i++) {
    s[i] = minus_infinity();
    if (8u * i < n) {
      float part[8];
      LILY_UNROLL for (uint k = 0; k < 8u; k++) {
        float row[DIMS], dot[4];
        load_dims<DIMS>(keys + ulong(metal::min(8u * i + k, n - 1u)) * D, D, lane, row);  // past the end: the last key again, masked below
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
      float score = fold_keys(part, lane) * scale;
      if (8u * i + lane / 4u < n) s[i] = score;
    }
  }
  float highest = metal::max(metal::max(s[0], s[1]), metal::max(s[2], s[3]));
  highest = metal::max(highest, simd_shuffle_xor(highest, ushort(4)));
  highest = metal::max(highest, simd_shuffle_xor(highest, ushort(8)));
  highest = metal::max(highest, simd_shuffle_xor(highest, ushort(16)));
  const float m = metal::max(x.m, highest), decay = metal::exp(x.m - m);
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
        load_dims<DIMS>(values + ulong(metal::min(8u * i + k, n - 1u)) * D, D, lane, row);  // past the end: p is zero
        LILY_UNROLL for (uint h = 0; h < HEADS; h++) {
          float weight = simd_shuffle(p, ushort(4u * k + h));
          LILY_UNROLL for (uint j = 0; j < DIMS; j++) x.o[h * DIMS + j] = metal::fma(weight, row[j], x.o[h * DIMS + j]);
        }
      }
    }
  }
}

// All of a simdgroup's keys in [bounds.first, bounds.end). `heads` of HEADS are real.
template <uint HEADS, uint DIMS>
inline void attend_split(thread Softmax<HEADS, DIMS>& x, constant LilyAttnArgs& args, device const act* q, device const uint* table, device const act* K, device const act* V,
                         SplitBounds bounds, uint kv, uint heads, uint simd, uint lane) {
  float query[HEADS * DIMS];
  LILY_UNROLL for (uint h = 0; h < HEADS; h++) load_dims<DIMS>(q + metal::min(h, heads - 1u) * args.D, args.D, lane, query + h * DIMS);
  LILY_UNROLL for (uint i = 0; i < HEADS * DIMS; i++) x.o[i] = 0.0f;
  x.m = minus_infinity();
  x.l = 0.0f;
  for (uint base = bounds.first + simd * STEP_KEYS; base < bounds.end; base += LILY_KV_BLOCK) {
    const ulong at = arena_offset(args, table, base, kv);
    attend<HEADS, DIMS>(x, query, K + at, V + at, metal::min(STEP_KEYS, bounds.end - base), args.D, args.scale, lane);
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

template <uint HEADS, uint DIMS>
kernel void attn_split(constant LilyStep& step [[buffer(0)]], device const act* q [[buffer(1)]], device const uint* table [[buffer(2)]],
                       device const act* K [[buffer(3)]], device const act* V [[buffer(4)]], device float* o [[buffer(5)]],
                       device float* ml [[buffer(6)]], constant LilyAttnArgs& args [[buffer(20)]], uint3 group [[threadgroup_position_in_grid]],
                       uint simd [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float part[4 * HEADS * DIMS * 32];
  threadgroup float ml_part[SIMDGROUPS * 8];
  const uint ratio = args.Hq / args.Hkv, heads = min(HEADS, ratio - group.x * HEADS), head = group.y * ratio + group.x * HEADS;
  const uint span = args.blocks_per_split * LILY_KV_BLOCK;
  SplitBounds bounds = {group.z * span, min(group.z * span + span, step.position + 1u)};
  device float* ml_out = ml + 2u * (group.z * args.Hq + head);
  if (bounds.first < bounds.end) {
    Softmax<HEADS, DIMS> x;
    attend_split<HEADS, DIMS>(x, args, q + head * args.D, table, K, V, bounds, group.y, heads, simd, lane);
    join<HEADS, DIMS>(x, true, heads, args.D, simd, lane, part, ml_part, o + (ulong(group.z) * args.Hq + head) * args.D, ml_out);
  } else if (simd == 0u && lane < heads) {
    ml_out[2u * lane] = minus_infinity();
    ml_out[2u * lane + 1u] = 0.0f;
  }
}
LILY_INSTANTIATE(attn_split_h4_d64, attn_split, 4, 2)
LILY_INSTANTIATE(attn_split_h4_d128, attn_split, 4, 4)
LILY_INSTANTIATE(attn_split_h4_d256, attn_split, 4, 8)
LILY_INSTANTIATE(attn_split_h1_d64, attn_split, 1, 2)
LILY_INSTANTIATE(attn_split_h1_d128, attn_split, 1, 4)
LILY_INSTANTIATE(attn_split_h1_d256, attn_split, 1, 8)

kernel void attn_split_long(constant LilyStep& step [[buffer(0)]], device const act* q [[buffer(1)]], device const uint* table [[buffer(2)]],
                            device const act* K [[buffer(3)]], device const act* V [[buffer(4)]], device float* o [[buffer(5)]],
                            device float* ml [[buffer(6)]], constant LilyAttnArgs& args [[buffer(20)]],
                            uint3 group [[threadgroup_position_in_grid]], uint simd [[simdgroup_index_in_threadgroup]],
                            uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float part[4 * 4 * 8 * 32];
  threadgroup float ml_part[SIMDGROUPS * 8];
  const uint keys = step.position + 1u, blocks = (keys + LILY_KV_BLOCK - 1u) / LILY_KV_BLOCK;
  const uint first = group.y * blocks / LILY_MAX_SPLITS, last = (group.y + 1u) * blocks / LILY_MAX_SPLITS;
  SplitBounds bounds;
  bounds.first = first * LILY_KV_BLOCK;
  bounds.end = min(last * LILY_KV_BLOCK, keys);
  const uint set = simd / SIMDGROUPS, head = group.x * 8u + set * 4u;
  device float* ml_out = ml + 2u * (group.y * args.Hq + head);
  if (first < last) {
    Softmax<4, 8> x;
    attend_split<4, 8>(x, args, q + head * args.D, table, K, V, bounds, group.x, 4u, simd % SIMDGROUPS, lane);
    device float* out = o + (ulong(group.y) * args.Hq + head) * args.D;
    join<4, 8>(x, set == 0u, 4u, args.D, simd % SIMDGROUPS, lane, part, ml_part, out, ml_out);
    join<4, 8>(x, set == 1u, 4u, args.D, simd % SIMDGROUPS, lane, part, ml_part, out, ml_out);
  } else if (simd % SIMDGROUPS == 0u && lane < 4u) {
    ml_out[2u * lane] = minus_infinity();
    ml_out[2u * lane + 1u] = 0.0f;
  }
}
LILY_INSTANTIATE(attn_split_long, attn_split_long)
