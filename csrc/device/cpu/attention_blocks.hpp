// The two products of prefill attention over one block of 64 keys, for a tile of queries (rows times heads of one kv head):
// s = q K^T and o += p V, with the sums of gemm_tile.hpp over the head dim and over the keys. A tile's queries and outputs lie in
// panels of 64 of the head dim: q, o [D/64][queries][64]; scores [queries][64].
#pragma once
#include "device/cpu/gemm_tile.hpp"

namespace lily::cpu::LILY_CPU_NS {

constexpr uint32_t kHeadPanels = 4;  // of 64 in the largest head dim
static_assert(kTileK == 64 && kTileN == 64);

// Where element [k][n] of a 64 x 64 tile lies in the form that multiply_tile reads.
LILY_INLINE uint32_t tile_at(uint32_t k, uint32_t n) { return n / kWidth * (kTileK * kWidth) + k * kWidth + n % kWidth; }

// 64 keys, elements [d0, d0 + 64) of D, zeros beyond D -> [d][key] in fp32, so that one query element meets sixteen keys at once.
LILY_INLINE void transpose_keys(const Bf16* keys, uint32_t D, uint32_t d0, float* out) {
  for (uint32_t k = 0; k < 64; k += 16) {
    uint32_t lane[16];
    for (uint32_t i = 0; i < 16; i++) lane[i] = (k + i) * D * 2;
    const U offset = loadu(lane);
    for (uint32_t d = 0; d < 64; d += 2) {
      const U pair = d0 + d < D ? gather_u32(keys + d0 + d, offset) : splatu(0);
      store(out + tile_at(d, k), from_bits(shl<16>(pair)));
      store(out + tile_at(d + 1, k), from_bits(andu(pair, splatu(0xffff0000u))));
    }
  }
}
LILY_INLINE void transpose_keys(const F32* keys, uint32_t D, uint32_t d0, float* out) {
  for (uint32_t k = 0; k < 64; k += 16) {
    uint32_t lane[16];
    for (uint32_t i = 0; i < 16; i++) lane[i] = (k + i) * D * 4;
    const U offset = loadu(lane);
    for (uint32_t d = 0; d < 64; d++) store(out + tile_at(d, k), d0 + d < D ? from_bits(gather_u32(keys + d0 + d, offset)) : zero());
  }
}

// The first `count` of 64 values, elements [d0, d0 + 64) of D, in fp32; zeros beyond.
template <class Act> LILY_INLINE void panel_values(const Act* values, uint32_t count, uint32_t D, uint32_t d0, float* out) {
  for (uint32_t k = 0; k < 64; k++)
    for (uint32_t d = 0; d < 64; d += 16) store(out + tile_at(k, d), k < count && d0 + d < D ? load(values + k * D + d0 + d) : zero());
}

template <class Act, uint32_t queries> struct VectorBlocks {
  static constexpr uint32_t kQueries = queries;
  alignas(64) float q[kHeadPanels * queries * 64], kv[64 * 64];

  void set_query(uint32_t i, const Act* x, uint32_t D) {
    for (uint32_t d = 0; d < round_up(D, 64); d += 16) store(q + (d / 64 * queries + i) * 64 + d % 64, d < D ? load(x + d) : zero());
  }
  void end_queries(uint32_t, uint32_t) {}
  // Scores of queries [first, last) with 64 keys; those of keys from `count` on are any.
  void scores(const Act* keys, uint32_t, uint32_t D, uint32_t first, uint32_t last, float* s) {
    for (uint32_t i = first * 64; i < last * 64; i += 16) store(s + i, zero());
    for (uint32_t d = 0; d < D; d += 64) {
      transpose_keys(keys, D, d, kv);
      multiply_tile<Act>(64, last - first, s + first * 64, q + (d / 64 * queries + first) * 64, kv, round_up(smaller(64, D - d), 32));
    }
  }
  // o += p V for queries [first, last), V's first `count` rows.
  void values(const Act* v, uint32_t count, uint32_t D, uint32_t first, uint32_t last, const float* p, float* o) {
    for (uint32_t d = 0; d < D; d += 64) {
      panel_values(v, count, D, d, kv);
      multiply_tile<Act>(64, last - first, o + (d / 64 * queries + first) * 64, p + first * 64, kv, 64);
    }
  }
};

}  // namespace lily::cpu::LILY_CPU_NS
