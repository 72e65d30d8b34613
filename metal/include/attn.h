// Attention: where things lie, and the arithmetic that fused kernels and their twins share.
#ifndef LILY_ATTN_H
#define LILY_ATTN_H
#include "reduce.h"
#include "rope.h"

// One row of qkv: Hq x (D query | D gate), Hkv x D keys, Hkv x D values. Offsets in floats.
inline uint query_offset(constant LilyAttnArgs& a, uint head) { return 2u * head * a.D; }
inline uint gate_offset(constant LilyAttnArgs& a, uint head) { return (2u * head + 1u) * a.D; }
inline uint key_offset(constant LilyAttnArgs& a, uint head) { return (2u * a.Hq + head) * a.D; }
inline uint value_offset(constant LilyAttnArgs& a, uint head) { return (2u * a.Hq + a.Hkv + head) * a.D; }

// Element offset of a position's row in an arena act[blocks][Hkv][256][D].
inline ulong arena_offset(constant LilyAttnArgs& a, device const uint* table, uint position, uint head) {
  return ((ulong(table[position / LILY_KV_BLOCK]) * a.Hkv + head) * LILY_KV_BLOCK + position % LILY_KV_BLOCK) * a.D;
}

// The factor of a head's norm by one simdgroup: 1 / sqrt(mean(x^2) + eps), sum as square_sum takes it. Then (x * r) * weight.
inline float head_rms(device const float* x, uint D, float eps, uint lane) { return rms_from_total(square_sum(x, D, lane), D, eps); }

// Rope of a head in threadgroup memory, by one simdgroup; a barrier before it and one after.
inline void rope_head(constant LilyAttnArgs& a, threadgroup float* x, uint position, uint lane) {
  const uint pairs = a.R / 2u;
  for (uint j = lane; j < pairs; j += 32u) {
    float low = x[j], high = x[j + pairs];
    rope_turn(low, high, float(position) * rope_frequency(a.rope_theta, j, pairs));
    x[j] = low;
    x[j + pairs] = high;
  }
}

// The output gate, before rounding.
inline float gated(float o, float gate) { return o * sigmoid(gate); }

#endif
