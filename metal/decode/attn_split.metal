// attn_split: softmax over a split's keys, not divided: o = sum(round(p) * V), ml = (max, sum of p). step, q act[Hq,D], table, K and V arenas
// -> o f32[splits,Hq,D], ml f32[splits,Hq,2]. A split past the last key: ml = (-inf, 0), o untouched.
// A threadgroup is one kv head, one split and HEADS query heads, which share each K and V row: it is read once, into registers, by whole lines
// (D = 256: 16 bytes a lane). grid: heads of a kv head / HEADS (fastest), Hkv, splits. 8 simdgroups: simdgroup s takes keys 32 s .. 32 s + 31
// of every block of 256; their results are joined in threadgroup memory.
// Bytes moved: each K and V row of the split once per HEADS query heads. LILY_KERNEL=attn_split=one_head: HEADS = 1, output in the same bits.
// attn_split_long: for long contexts of D = 256 and 8 query heads a kv head. 64 splits that share the context's own blocks evenly, where attn_split
// cuts the capacity it was recorded for; two sets of 8 simdgroups take 4 heads each of the same keys. grid: Hkv (fastest), 64 splits.
// A probability is rounded against the maximum over the split's keys up to the end of its absolute block of 64, as on the CPU and in prefill:
// the simdgroups tell each other their maxima once every 256 keys.
// Order of sums (contract: it depends on positions and the split's bounds alone): a score is DIMS products by fma in a lane, then lane_sum;
// p of keys 8 apart added in order, then keys as lane_sum adds lanes; o by fma over a simdgroup's keys ascending; simdgroups joined as
// s + (s + 4), + 2, + 1; sums of p over simdgroups ascending.
#include "lily.h"
#include "attn_split.h"

template <uint HEADS, uint DIMS>
kernel void attn_split(constant LilyStep& step [[buffer(0)]], device const act* q [[buffer(1)]], device const uint* table [[buffer(2)]],
                       device const act* K [[buffer(3)]], device const act* V [[buffer(4)]], device float* o [[buffer(5)]],
                       device float* ml [[buffer(6)]], constant LilyAttnArgs& args [[buffer(20)]], uint3 group [[threadgroup_position_in_grid]],
                       uint simd [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float part[4 * HEADS * DIMS * 32];
  threadgroup float ml_part[SIMDGROUPS * 8];
  threadgroup float maxima[SIMDGROUPS * 8];
  const uint ratio = args.Hq / args.Hkv, heads = min(HEADS, ratio - group.x * HEADS), head = group.y * ratio + group.x * HEADS;
  const uint span = args.blocks_per_split * LILY_KV_BLOCK;
  SplitBounds bounds = {group.z * span, min(group.z * span + span, step.position + 1u)};
  device float* ml_out = ml + 2u * (group.z * args.Hq + head);
  if (bounds.first < bounds.end) {
    Softmax<HEADS, DIMS> x;
    attend<HEADS, DIMS>(x, args, q + head * args.D, table, K, V, bounds, group.y, heads, simd, lane, maxima);
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
  threadgroup float maxima[2 * SIMDGROUPS * 8];
  const uint keys = step.position + 1u, blocks = (keys + LILY_KV_BLOCK - 1u) / LILY_KV_BLOCK;
  const uint first = group.y * blocks / LILY_MAX_SPLITS, last = (group.y + 1u) * blocks / LILY_MAX_SPLITS;
  SplitBounds bounds;
  bounds.first = first * LILY_KV_BLOCK;
  bounds.end = min(last * LILY_KV_BLOCK, keys);
  const uint set = simd / SIMDGROUPS, head = group.x * 8u + set * 4u;
  device float* ml_out = ml + 2u * (group.y * args.Hq + head);
  if (first < last) {
    Softmax<4, 8> x;
    attend<4, 8>(x, args, q + head * args.D, table, K, V, bounds, group.x, 4u, simd % SIMDGROUPS, lane, maxima + set * SIMDGROUPS * 8u);
    device float* out = o + (ulong(group.y) * args.Hq + head) * args.D;
    join<4, 8>(x, set == 0u, 4u, args.D, simd % SIMDGROUPS, lane, part, ml_part, out, ml_out);
    join<4, 8>(x, set == 1u, 4u, args.D, simd % SIMDGROUPS, lane, part, ml_part, out, ml_out);
  } else if (simd % SIMDGROUPS == 0u && lane < 4u) {
    ml_out[2u * lane] = minus_infinity();
    ml_out[2u * lane + 1u] = 0.0f;
  }
}
LILY_INSTANTIATE(attn_split_long, attn_split_long)
