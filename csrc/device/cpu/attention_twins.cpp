// The unfused steps around attention, one kernel each; together they equal attn_prepare(_rows) and the gate of attn_combine and
// attn_rows bit for bit. grid: T, idle past step.rows.
#include "device/cpu/attention.hpp"

namespace lily::cpu::LILY_CPU_NS {

// head_norm_rows. out[t,h] = norm(x[t,h]) * weight, f32[T,heads,D]: the query heads, or the key heads when `key`.
template <class Act>
static void head_norm_rows(const KernelCall& c, uint32_t begin, uint32_t end) {
  const auto& a = args<LilyAttnArgs>(c);
  uint32_t rows = buffer<const LilyStep>(c, 0)->rows, heads = a.key ? a.Hkv : a.Hq;
  for (uint32_t t = begin; t < end && t < rows; t++) {
    const float* row = buffer<const float>(c, 1) + uint64_t(t) * a.ld;
    for (uint32_t h = 0; h < heads; h++)
      norm_head(a.key ? key_of(a, row, h) : query_of(a, row, h), buffer<const float>(c, 2), a.D, a.eps,
                buffer<float>(c, 3) + (uint64_t(t) * heads + h) * a.D);
  }
}

// A head turned into x: the input stays as it is.
LILY_INLINE void turn_head(const Rope& rope, const float* head, uint32_t D, float* x) {
  for (uint32_t i = 0; i < D; i += 16) store(x + i, load(head + i));
  rope_head(rope, x);
}

// rope_rows. q[t,h] = round(rope(x[t,h])), x f32[T,Hq,D].
template <class Act>
static void rope_rows(const KernelCall& c, uint32_t begin, uint32_t end) {
  const auto& a = args<LilyAttnArgs>(c);
  const auto& step = *buffer<const LilyStep>(c, 0);
  Rope rope;
  rope_start(rope, a);
  alignas(64) float x[max_head_dim];
  for (uint32_t t = begin; t < end && t < step.rows; t++) {
    rope_at(rope, step.position + t);
    for (uint64_t i = uint64_t(t) * a.Hq * a.D, stop = i + a.Hq * a.D; i < stop; i += a.D) {
      turn_head(rope, buffer<const float>(c, 1) + i, a.D, x);
      copy_head(x, a.D, buffer<Act>(c, 2) + i);
    }
  }
}

// kv_write_rows. K[position + t, j] = round(rope(k[t,j])), k f32[T,Hkv,D] after its norm; V[position + t, j] = round(value j of qkv).
template <class Act>
static void kv_write_rows(const KernelCall& c, uint32_t begin, uint32_t end) {
  const auto& a = args<LilyAttnArgs>(c);
  const auto& step = *buffer<const LilyStep>(c, 0);
  Rope rope;
  rope_start(rope, a);
  alignas(64) float x[max_head_dim];
  for (uint32_t t = begin; t < end && t < step.rows; t++) {
    rope_at(rope, step.position + t);
    for (uint32_t j = 0; j < a.Hkv; j++) {
      uint64_t at = arena_offset(a, buffer<const uint32_t>(c, 3), step.position + t, j);
      turn_head(rope, buffer<const float>(c, 1) + (uint64_t(t) * a.Hkv + j) * a.D, a.D, x);
      copy_head(x, a.D, buffer<Act>(c, 4) + at);
      copy_head(value_of(a, buffer<const float>(c, 2) + uint64_t(t) * a.ld, j), a.D, buffer<Act>(c, 5) + at);
    }
  }
}

// gate_rows. x[t,h] = round(o[t,h] * sigmoid(gate h of qkv)), o f32[T,Hq*D].
template <class Act>
static void gate_rows(const KernelCall& c, uint32_t begin, uint32_t end) {
  const auto& a = args<LilyAttnArgs>(c);
  uint32_t rows = buffer<const LilyStep>(c, 0)->rows;
  for (uint32_t t = begin; t < end && t < rows; t++)
    for (uint32_t h = 0; h < a.Hq; h++) {
      uint64_t at = (uint64_t(t) * a.Hq + h) * a.D;
      gate_head(buffer<const float>(c, 1) + at, gate_of(a, buffer<const float>(c, 2) + uint64_t(t) * a.ld, h), a.D, buffer<Act>(c, 3) + at);
    }
}

}  // namespace lily::cpu::LILY_CPU_NS

LILY_KERNELS(attention_twins, {"head_norm_rows", head_norm_rows<Bf16>, head_norm_rows<F32>}, {"rope_rows", rope_rows<Bf16>, rope_rows<F32>},
             {"kv_write_rows", kv_write_rows<Bf16>, kv_write_rows<F32>}, {"gate_rows", gate_rows<Bf16>, gate_rows<F32>})
