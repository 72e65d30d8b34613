// Prefill attention over a chunk of T rows. A row's result depends on its position and the tokens alone: keys are summed in blocks of
// 64 at absolute multiples, each score and each output element in one fixed order, and a masked key is never touched.
#include "device/cpu/attention.hpp"

namespace lily::cpu::LILY_CPU_NS {

// attn_prepare_rows. Per row t at position + t: q[t] = round(rope(norm(queries))); K[t] = round(rope(norm(keys))), V[t] = round(values).
// grid: T, idle past step.rows.
template <class Act>
static void attn_prepare_rows(const KernelCall& c, uint32_t begin, uint32_t end) {
  const auto& a = args<LilyAttnArgs>(c);
  const auto& step = *buffer<const LilyStep>(c, 0);
  Rope rope;
  rope_start(rope, a);
  alignas(64) float x[max_head_dim];
  for (uint32_t t = begin; t < end && t < step.rows; t++) {
    const float* row = buffer<const float>(c, 1) + uint64_t(t) * a.ld;
    rope_at(rope, step.position + t);
    for (uint32_t h = 0; h < a.Hq; h++) {
      norm_head(query_of(a, row, h), buffer<const float>(c, 2), a.D, a.eps, x);
      rope_head(rope, x);
      copy_head(x, a.D, buffer<Act>(c, 7) + (uint64_t(t) * a.Hq + h) * a.D);
    }
    for (uint32_t j = 0; j < a.Hkv; j++) {
      uint64_t at = arena_offset(a, buffer<const uint32_t>(c, 4), step.position + t, j);
      norm_head(key_of(a, row, j), buffer<const float>(c, 3), a.D, a.eps, x);
      rope_head(rope, x);
      copy_head(x, a.D, buffer<Act>(c, 5) + at);
      copy_head(value_of(a, row, j), a.D, buffer<Act>(c, 6) + at);
    }
  }
}

// 64 keys [64][D] -> [D][64] in fp32, so that one query element meets sixteen keys at once.
LILY_INLINE void transpose_keys(const Bf16* keys, uint32_t D, float* out) {
  for (uint32_t d0 = 0; d0 < D; d0 += 32)  // a cache line of each key
    for (uint32_t k = 0; k < key_block; k += 16) {
      uint32_t lane[16];
      for (uint32_t i = 0; i < 16; i++) lane[i] = (k + i) * D * 2;
      U offset = loadu(lane);
      for (uint32_t d = d0; d < d0 + 32 && d < D; d += 2) {
        U pair = gather_u32(keys + d, offset);
        store(out + d * key_block + k, from_bits(shl<16>(pair)));
        store(out + (d + 1) * key_block + k, from_bits(andu(pair, splatu(0xffff0000u))));
      }
    }
}
LILY_INLINE void transpose_keys(const F32* keys, uint32_t D, float* out) {
  for (uint32_t d0 = 0; d0 < D; d0 += 16)
    for (uint32_t k = 0; k < key_block; k += 16) {
      uint32_t lane[16];
      for (uint32_t i = 0; i < 16; i++) lane[i] = (k + i) * D * 4;
      U offset = loadu(lane);
      for (uint32_t d = d0; d < d0 + 16; d++) store(out + d * key_block + k, from_bits(gather_u32(keys + d, offset)));
    }
}

// The first `count` values [64][D] -> panels [D/64][64][64] in fp32: a panel stays in the first-level cache while all rows use it.
template <class Act>
LILY_INLINE void panel_values(const Act* values, uint32_t count, uint32_t D, float* out) {
  for (uint32_t k = 0; k < count; k++)
    for (uint32_t d = 0; d < D; d += 16) store(out + d / 64 * 64 * key_block + k * 64 + d % 64, load(values + k * D + d));
}

constexpr uint32_t tile_queries = 128;  // rows times heads computed together

struct RowsScratch {
  alignas(64) float q[tile_queries * max_head_dim];
  alignas(64) float o[tile_queries * max_head_dim];
  alignas(64) float s[tile_queries * key_block];
  alignas(64) float kv[key_block * max_head_dim];  // transposed keys, then panels of values
  alignas(64) float m[tile_queries], l[tile_queries], decay[tile_queries + 16];
};

struct RowsTile {
  uint32_t kv, heads, first, rows;  // rows [first, first + rows) of the chunk, all query heads of one kv head
  uint32_t position;                // of row `first`
};

template <class Act>
static void attend_tile(const KernelCall& c, const LilyAttnArgs& a, const RowsTile& t, RowsScratch& w) {
  uint32_t D = a.D, heads = t.heads;
  for (uint32_t r = 0; r < t.rows; r++) {
    const Act* q = buffer<const Act>(c, 1) + (uint64_t(t.first + r) * a.Hq + t.kv * heads) * D;
    for (uint32_t i = 0; i < heads * D; i += 16) {
      store(w.q + r * heads * D + i, load(q + i));
      store(w.o + r * heads * D + i, zero());
    }
  }
  for (uint32_t i = 0; i < t.rows * heads; i++) w.m[i] = minus_infinity, w.l[i] = 0;

  uint32_t last = t.position + t.rows - 1;
  for (uint32_t base = 0; base <= last; base += key_block) {
    uint64_t at = arena_offset(a, buffer<const uint32_t>(c, 3), base, t.kv);
    uint32_t from = base > t.position ? base - t.position : 0;  // rows before it see no key of this block
    uint32_t first = from * heads, active = (t.rows - from) * heads;
    float *q = w.q + first * D, *s = w.s + first * key_block;

    transpose_keys(buffer<const Act>(c, 4) + at, D, w.kv);
    for (uint32_t i = 0; i < active * key_block; i += 16) store(s + i, zero());
    for (uint32_t d = 0; d < D; d += 64)
      multiply(Product<float>{q + d, D, w.kv + d * key_block, key_block, D - d < 64 ? D - d : 64, s, key_block, nullptr}, active, key_block);

    auto keys_of = [&](uint32_t i) {
      uint32_t keys = t.position + from + i / heads - base + 1;
      return keys < key_block ? keys : key_block;
    };
    softmax_block<Act>(s, active, keys_of, a.scale, w.m + first, w.l + first, w.decay + first);

    panel_values(buffer<const Act>(c, 5) + at, last - base + 1 < key_block ? last - base + 1 : key_block, D, w.kv);
    // where every row sees the whole block the rows go together, on the diagonal one by one
    uint32_t together = base + key_block - 1 <= t.position ? t.rows : 1;
    for (uint32_t d = 0; d < D; d += 64)
      for (uint32_t r = from; r < t.rows; r += together) {
        uint32_t i = r * heads;
        multiply(Product<float>{w.s + i * key_block, key_block, w.kv + d * key_block, 64, keys_of(i - first), w.o + i * D + d, D, w.decay + i},
                 together * heads, D - d < 64 ? D - d : 64);
      }
  }

  for (uint32_t r = 0; r < t.rows; r++) {
    const float* row = buffer<const float>(c, 2) + uint64_t(t.first + r) * a.ld;
    for (uint32_t h = 0; h < heads; h++) {
      float* o = w.o + (r * heads + h) * D;
      uint64_t out = (uint64_t(t.first + r) * a.Hq + t.kv * heads + h) * D;
      for (uint32_t i = 0; i < D; i += 16) store(o + i, mul(load(o + i), splat(1.0f / w.l[r * heads + h])));
      if (a.gated)
        gate_head(o, gate_of(a, row, t.kv * heads + h), D, buffer<Act>(c, 6) + out);
      else
        copy_head(o, D, buffer<F32>(c, 6) + out);
    }
  }
}

// attn_rows. o[t,h] = sum over keys k <= position + t of softmax(scale * q[t,h].K[k]) * V[k], online over blocks of 64 keys;
// x = round(o * sigmoid(gate)), or o in f32 when not gated. grid: Hkv x ceil(T/rows_per_group), kv head fastest, idle past step.rows.
// Bytes: K and V of all keys once per 128/(Hq/Hkv) rows; scratch about 350 KB a thread, whatever the context.
template <class Act>
static void attn_rows(const KernelCall& c, uint32_t begin, uint32_t end) {
  const auto& a = args<LilyAttnArgs>(c);
  const auto& step = *buffer<const LilyStep>(c, 0);
  uint32_t heads = a.Hq / a.Hkv, tile = tile_queries / heads;
  RowsScratch scratch;
  for (uint32_t g = begin; g < end; g++) {
    uint32_t from = g / a.Hkv * a.rows_per_group, to = from + a.rows_per_group;
    if (to > step.rows) to = step.rows;
    for (uint32_t t = from; t < to; t += tile)
      attend_tile<Act>(c, a, {g % a.Hkv, heads, t, to - t < tile ? to - t : tile, step.position + t}, scratch);
  }
}

}  // namespace lily::cpu::LILY_CPU_NS

LILY_KERNELS(attention_rows, {"attn_prepare_rows", attn_prepare_rows<Bf16>, attn_prepare_rows<F32>}, {"attn_rows", attn_rows<Bf16>, attn_rows<F32>})
