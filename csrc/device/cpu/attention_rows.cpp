// Prefill attention over a chunk of T rows. A row's result depends on its position and the tokens alone: keys are summed in blocks of
// 64 at absolute multiples, each score and each output element in one fixed order, and a masked key never reaches a sum.
#if defined(LILY_AMX)
#include "device/cpu/amx_attention.hpp"
#else
#include "device/cpu/attention_blocks.hpp"
#endif
#include "device/cpu/attention.hpp"
#include "device/cpu/kernel.hpp"

namespace lily::cpu::LILY_CPU_NS {

#if !defined(LILY_AMX)
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

#endif

struct RowsTile {
  uint32_t kv, heads, first, rows;  // rows [first, first + rows) of the chunk, all query heads of one kv head
  uint32_t position;                // of row `first`
};

template <class Blocks> struct RowsScratch {
  Blocks blocks;
  alignas(64) float o[kHeadPanels * Blocks::kQueries * 64];
  alignas(64) float s[Blocks::kQueries * key_block];
  alignas(64) float m[Blocks::kQueries], l[Blocks::kQueries], decay[Blocks::kQueries + 16];

  float* output(uint32_t i, uint32_t d) { return o + (d / 64 * Blocks::kQueries + i) * 64 + d % 64; }
};

template <class Act> LILY_INLINE bool all_finite(const Act* x, uint32_t n) {
  V sum = zero();
  for (uint32_t i = 0; i < n; i += 16) sum = fma(load(x + i), zero(), sum);
  return reduce_add(sum) == 0;
}

template <class Act, class Blocks> static void attend_tile(const KernelCall& c, const LilyAttnArgs& a, const RowsTile& t, RowsScratch<Blocks>& w) {
  const uint32_t D = a.D, heads = t.heads, n = t.rows * heads;
  auto query = [&](uint32_t i) { return (uint64_t(t.first + i / heads) * a.Hq + t.kv * heads + i % heads) * D; };
  for (uint32_t i = 0; i < n; i++) w.blocks.set_query(i, buffer<const Act>(c, 1) + query(i), D);
  w.blocks.end_queries(n, D);
  for (uint32_t i = 0; i < n; i++) {
    w.m[i] = minus_infinity, w.l[i] = 0;
    for (uint32_t d = 0; d < round_up(D, 64); d += 16) store(w.output(i, d), zero());
  }

  const uint32_t last = t.position + t.rows - 1;
  for (uint32_t base = 0; base <= last; base += key_block) {
    const uint64_t at = arena_offset(a, buffer<const uint32_t>(c, 3), base, t.kv);
    const Act *keys = buffer<const Act>(c, 4) + at, *values = buffer<const Act>(c, 5) + at;
    const uint32_t from = base > t.position ? base - t.position : 0;  // rows before it see no key of this block
    const uint32_t first = from * heads, count = smaller(key_block, last - base + 1);
    auto keys_of = [&](uint32_t i) { return smaller(key_block, t.position + i / heads - base + 1); };

    w.blocks.scores(keys, count, D, first, n, w.s);
    softmax_block<Act>(w.s + first * key_block, n - first, [&](uint32_t i) { return keys_of(first + i); }, a.scale, w.m + first, w.l + first, w.decay + first);
    for (uint32_t i = first; i < n; i++)
      if (w.decay[i] != 1.0f)
        for (uint32_t d = 0; d < D; d += 16) store(w.output(i, d), mul(load(w.output(i, d)), splat(w.decay[i])));
    // A masked key has the factor zero, which hides any value but those that are not finite: then row by row.
    if (keys_of(first) >= count || all_finite(values, count * D))
      w.blocks.values(values, count, D, first, n, w.s, w.o);
    else
      for (uint32_t i = first; i < n; i += heads) w.blocks.values(values, keys_of(i), D, i, i + heads, w.s, w.o);
  }

  for (uint32_t i = 0; i < n; i++) {
    alignas(64) float o[max_head_dim];
    for (uint32_t d = 0; d < D; d += 16) store(o + d, mul(load(w.output(i, d)), splat(1.0f / w.l[i])));
    const float* row = buffer<const float>(c, 2) + uint64_t(t.first + i / heads) * a.ld;
    if (a.gated)
      gate_head(o, gate_of(a, row, t.kv * heads + i % heads), D, buffer<Act>(c, 6) + query(i));
    else
      copy_head(o, D, buffer<F32>(c, 6) + query(i));
  }
}

// attn_rows. o[t,h] = sum over keys k <= position + t of softmax(scale * q[t,h].K[k]) * V[k], online over blocks of 64 keys;
// x = round(o * sigmoid(gate)), or o in f32 when not gated. grid: Hkv x ceil(T/rows_per_group), kv head fastest, idle past step.rows.
// The row groups of a range go together, kQueries queries at a time: bytes are K and V of all keys once for each of these tiles.
template <class Act, class Blocks> static void attend_rows(const KernelCall& c, uint32_t begin, uint32_t end) {
  const auto& a = args<LilyAttnArgs>(c);
  const auto& step = *buffer<const LilyStep>(c, 0);
  const uint32_t heads = a.Hq / a.Hkv, tile = Blocks::kQueries / heads;
  RowsScratch<Blocks> scratch;
  for (uint32_t kv = 0; kv < a.Hkv; kv++) {
    const uint32_t from = (begin + a.Hkv - 1 - kv) / a.Hkv * a.rows_per_group;
    const uint32_t to = smaller(step.rows, (end + a.Hkv - 1 - kv) / a.Hkv * a.rows_per_group);
    for (uint32_t t = from; t < to; t += tile) attend_tile<Act>(c, a, {kv, heads, t, smaller(tile, to - t), step.position + t}, scratch);
  }
}

template <class Act> static void attn_rows(const KernelCall& c, uint32_t begin, uint32_t end) {
#if defined(LILY_AMX)
  if constexpr (sizeof(Act) == sizeof(Bf16)) return attend_rows<Act, TileBlocks<256>>(c, begin, end);
#endif
  attend_rows<Act, VectorBlocks<Act, 128>>(c, begin, end);
}

}  // namespace lily::cpu::LILY_CPU_NS

LILY_KERNELS(attention_rows, {"attn_rows", attn_rows<Bf16>, attn_rows<F32>}
#if !defined(LILY_AMX)
             , {"attn_prepare_rows", attn_prepare_rows<Bf16>, attn_prepare_rows<F32>}
#endif
)
