// Decode attention: prepare (norm, rope, K/V write), split over keys, combine with the output gate.
#include "device/cpu/attention.hpp"

namespace lily::cpu::LILY_CPU_NS {

// attn_prepare. Group g < Hq: q[g] = round(rope(norm(query g))). Group Hq + j: K[position, j] = round(rope(norm(key j))),
// V[position, j] = round(value j). grid: Hq + Hkv. Bytes: one qkv row without its gates in, Hq*D + 2*Hkv*D act out.
template <class Act>
static void attn_prepare(const KernelCall& c, uint32_t begin, uint32_t end) {
  const auto& a = args<LilyAttnArgs>(c);
  uint32_t position = buffer<const LilyStep>(c, 0)->position;
  const float* row = buffer<const float>(c, 1);
  Rope rope;
  rope_start(rope, a);
  rope_at(rope, position);
  alignas(64) float x[max_head_dim];
  for (uint32_t g = begin; g < end; g++) {
    bool is_query = g < a.Hq;
    uint32_t head = is_query ? g : g - a.Hq;
    norm_head(is_query ? query_of(a, row, head) : key_of(a, row, head), buffer<const float>(c, is_query ? 2 : 3), a.D, a.eps, x);
    rope_head(rope, x);
    if (is_query) {
      copy_head(x, a.D, buffer<Act>(c, 7) + head * a.D);
    } else {
      uint64_t at = arena_offset(a, buffer<const uint32_t>(c, 4), position, head);
      copy_head(x, a.D, buffer<Act>(c, 5) + at);
      copy_head(value_of(a, row, head), a.D, buffer<Act>(c, 6) + at);
    }
  }
}

// s[h][k] = q[h] . K[k]: sixteen partial sums over D ascending, then reduce_add, whatever the tile.
template <uint32_t H, uint32_t N, class Act>
LILY_INLINE void score_tile(const float* q, const Act* keys, uint64_t D, float* s) {
  V acc[H * N];
  LILY_UNROLL for (uint32_t i = 0; i < H * N; i++) acc[i] = zero();
  const float* x[H];
  const Act* y[N];
  LILY_UNROLL for (uint32_t h = 0; h < H; h++) x[h] = q + h * D;
  LILY_UNROLL for (uint32_t n = 0; n < N; n++) y[n] = keys + n * D;
  for (uint64_t d = 0; d < D; d += 16) {
    V k[N];
    LILY_UNROLL for (uint32_t n = 0; n < N; n++) k[n] = load(y[n] + d);
    LILY_UNROLL for (uint32_t h = 0; h < H; h++) {
      V v = load(x[h] + d);
      LILY_UNROLL for (uint32_t n = 0; n < N; n++) acc[h * N + n] = fma(v, k[n], acc[h * N + n]);
    }
  }
  constexpr uint32_t together = H * N % 4 ? 1 : 4;
  float sums[H * N];
  LILY_UNROLL for (uint32_t i = 0; i < H * N; i += together) reduce_rows<together>(acc + i, sums + i);
  LILY_UNROLL for (uint32_t h = 0; h < H; h++) std::memcpy(s + h * key_block, sums + h * N, N * sizeof(float));
}

template <uint32_t N, class Act>
LILY_INLINE void score_heads(const float* q, uint32_t heads, const Act* keys, uint64_t D, float* s) {
  uint32_t h = 0;
  if constexpr (tall_rows > 0 && N % 2 == 0)
    for (; h + tall_rows <= heads; h += tall_rows)
      for (uint32_t n = 0; n < N; n += 2) score_tile<tall_rows, 2>(q + h * D, keys + n * D, D, s + h * key_block + n);
  for (; h + tile_rows <= heads; h += tile_rows) score_tile<tile_rows, N>(q + h * D, keys, D, s + h * key_block);
  for (; h < heads; h++) score_tile<1, N>(q + h * D, keys, D, s + h * key_block);
}

// `values` are the rows read next: asked for now, they arrive while the scores are computed; keys are asked for eight ahead.
template <class Act>
LILY_INLINE void score_keys(const float* q, uint32_t heads, const Act* keys, const Act* values, uint32_t count, uint64_t D, float* s) {
  constexpr uint32_t N = tile_vectors;
  uint32_t k = 0;
  for (; k + N <= count; k += N) {
    for (uint64_t i = k * D; i < (k + N) * D; i += 64 / sizeof(Act)) {
      __builtin_prefetch(values + i, 0, 2);
      __builtin_prefetch(keys + 8 * D + i, 0, 3);
    }
    score_heads<N>(q, heads, keys + k * D, D, s + k);
  }
  for (; k < count; k++) score_heads<1>(q, heads, keys + k * D, D, s + k);
}

// attn_split. Split s of kv head j: softmax over the keys of blocks [s*b, (s+1)*b) up to the step's position, in blocks of 64 keys:
// o = sum(round(p) * V) (not divided), ml = (max, sum of p). Past the last key: ml = (-inf, 0), o untouched.
// grid: Hkv * n_splits, kv head fastest. Bytes: each K and V row of the split once, for all Hq/Hkv heads.
template <class Act>
static void attn_split(const KernelCall& c, uint32_t begin, uint32_t end) {
  const auto& a = args<LilyAttnArgs>(c);
  uint32_t keys = buffer<const LilyStep>(c, 0)->position + 1, heads = a.Hq / a.Hkv, D = a.D;
  const uint32_t* table = buffer<const uint32_t>(c, 2);
  alignas(64) float q[max_group_heads * max_head_dim], o[max_group_heads * max_head_dim], s[max_group_heads * key_block];
  float m[max_group_heads], l[max_group_heads], decay[max_group_heads];
  const auto first_key = [&](uint32_t g) { return uint64_t(g / a.Hkv) * a.blocks_per_split * LILY_KV_BLOCK; };
  for (uint32_t g = begin; g < end; g++) {
    uint32_t kv = g % a.Hkv, split = g / a.Hkv;
    uint64_t from = first_key(g);
    uint64_t to = from + uint64_t(a.blocks_per_split) * LILY_KV_BLOCK;
    if (to > keys) to = keys;
    const Act* query = buffer<const Act>(c, 1) + kv * heads * D;
    for (uint32_t i = 0; i < heads * D; i += 16) {
      store(q + i, load(query + i));
      store(o + i, zero());
    }
    for (uint32_t h = 0; h < heads; h++) m[h] = minus_infinity, l[h] = 0;
    for (uint64_t base = from; base < to; base += key_block) {
      uint64_t at = arena_offset(a, table, uint32_t(base), kv);
      uint32_t count = uint32_t(to - base < key_block ? to - base : key_block);
      score_keys(q, heads, buffer<const Act>(c, 3) + at, buffer<const Act>(c, 4) + at, count, D, s);
      softmax_block<Act>(s, heads, [count](uint32_t) { return count; }, a.scale, m, l, decay);
      // while values are multiplied, the keys that come next are fetched: of this split, or of the next one
      const Act* next = nullptr;
      if (base + key_block < to)
        next = buffer<const Act>(c, 3) + arena_offset(a, table, uint32_t(base + key_block), kv);
      else if (g + 1 < end && first_key(g + 1) < keys)
        next = buffer<const Act>(c, 3) + arena_offset(a, table, uint32_t(first_key(g + 1)), (g + 1) % a.Hkv);
      multiply(HeadProduct<Act>{s, key_block, buffer<const Act>(c, 4) + at, D, count, o, D, decay, next}, heads, D);
    }
    uint64_t first = uint64_t(split) * a.Hq + kv * heads;
    float* ml = buffer<float>(c, 6) + 2 * first;
    for (uint32_t h = 0; h < heads; h++) ml[2 * h] = m[h], ml[2 * h + 1] = l[h];
    if (from < to) copy_head(o, heads * D, reinterpret_cast<F32*>(buffer<float>(c, 5)) + first * D);
  }
}

// attn_combine. o = (sum over s of e_s o_s) / (sum over s of e_s l_s), e_s = exp(m_s - max m), splits ascending, empty ones ignored;
// x = round(o * sigmoid(gate)), or o in f32 when not gated. grid: Hq.
template <class Act>
static void attn_combine(const KernelCall& c, uint32_t begin, uint32_t end) {
  const auto& a = args<LilyAttnArgs>(c);
  const float* ml = buffer<const float>(c, 2);
  uint32_t D = a.D;
  for (uint32_t head = begin; head < end; head++) {
    float highest = minus_infinity, sum = 0;
    for (uint32_t s = 0; s < a.n_splits; s++) {
      const float* pair = ml + 2 * (s * a.Hq + head);
      if (pair[1] != 0 && pair[0] > highest) highest = pair[0];
    }
    alignas(64) float o[max_head_dim];
    for (uint32_t i = 0; i < D; i += 16) store(o + i, zero());
    for (uint32_t s = 0; s < a.n_splits; s++) {
      const float* pair = ml + 2 * (s * a.Hq + head);
      if (pair[1] == 0) continue;
      float e = exp1(pair[0] - highest);
      sum += e * pair[1];
      const float* part = buffer<const float>(c, 1) + (uint64_t(s) * a.Hq + head) * D;
      for (uint32_t i = 0; i < D; i += 16) store(o + i, fma(splat(e), load(part + i), load(o + i)));
    }
    for (uint32_t i = 0; i < D; i += 16) store(o + i, mul(load(o + i), splat(1.0f / sum)));
    if (a.gated)
      gate_head(o, gate_of(a, buffer<const float>(c, 4), head), D, buffer<Act>(c, 3) + head * D);
    else
      copy_head(o, D, buffer<F32>(c, 3) + head * D);
  }
}

}  // namespace lily::cpu::LILY_CPU_NS

LILY_KERNELS(attention_step, {"attn_prepare", attn_prepare<Bf16>, attn_prepare<F32>}, {"attn_split", attn_split<Bf16>, attn_split<F32>},
             {"attn_combine", attn_combine<Bf16>, attn_combine<F32>})
