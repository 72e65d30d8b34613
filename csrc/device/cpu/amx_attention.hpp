// The products of attention_blocks.hpp on tiles. Scores: A = queries, 16 x 32 of D; B = keys, packed as pairs of d. Values: A = probabilities,
// 16 queries x 32 keys, four tiles that stay in registers for all of D; B = values as pairs of keys.
#pragma once
#include "device/cpu/amx_panel.hpp"
#include "device/cpu/attention_blocks.hpp"

namespace lily::cpu::LILY_CPU_NS {

// Bf16 values of 32 floats that are representable.
LILY_INLINE __m512i narrow_pair(const float* x) {
  const __m256i low = _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_loadu_si512(x), 16)), high = _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_loadu_si512(x + 16), 16));
  return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

template <uint32_t queries> class TileBlocks {
 public:
  static constexpr uint32_t kQueries = queries;

  void set_query(uint32_t i, const Bf16* x, uint32_t D) {
    const uint32_t depth = (D + 31) / 32;
    uint32_t* out = q_ + uint64_t(i / kBlockN) * depth * 2 * kTileWords + i % kBlockN * 16;
    for (uint32_t k = 0; k < depth; k++) _mm512_store_si512(out + k * 2 * kTileWords, _mm512_maskz_loadu_epi32(32 * k + 32 <= D ? 0xffff : 0x00ff, x + 32 * k));
  }
  // Queries up to the next multiple of 32 are zeros.
  void end_queries(uint32_t count, uint32_t D) {
    alignas(64) static const Bf16 nothing[kHeadPanels * 64] = {};
    for (uint32_t i = count; i % kBlockN; i++) set_query(i, nothing, D);
  }

  void scores(const Bf16* keys, uint32_t count, uint32_t D, uint32_t first, uint32_t last, float* s) {
    Panel panel{kv_, count, (D + 31) / 32};
    panel.pack({keys, nullptr, D}, 0);
    TileSession tiles;
    for (uint32_t i = first / kBlockN * kBlockN; i < last; i += kBlockN)
      for (uint32_t b = 0; b < panel.blocks(); b++) {
        const uint32_t* a = q_ + uint64_t(i) * panel.depth * 16;
        float* c = s + i * 64 + b * kBlockT;
        if (last - i <= kTileRows)
          panel.single(b) ? block_scores<1, 1>(a, panel.tiles(b), panel.depth, c) : block_scores<1, 2>(a, panel.tiles(b), panel.depth, c);
        else
          panel.single(b) ? block_scores<2, 1>(a, panel.tiles(b), panel.depth, c) : block_scores<2, 2>(a, panel.tiles(b), panel.depth, c);
      }
  }

  void values(const Bf16* v, uint32_t count, uint32_t D, uint32_t first, uint32_t last, const float* p, float* o) {
    pack_values(v, count, D);
    // The first tile may begin before `first`: those outputs come back as they were.
    const uint32_t start = first / kBlockN * kBlockN;
    for (uint32_t d = 0; start < first && d < D; d += 64) std::memcpy(kept_ + d * kBlockN, o + (d / 64 * queries + start) * 64, (first - start) * 256);
    TileSession tiles;
    for (uint32_t i = start; i < last; i += kBlockN) {
      for (uint32_t r = 0; r < kBlockN; r++)
        for (uint32_t k = 0; k < 2; k++)
          _mm512_store_si512(p_ + (k * 2 + r / 16) * kTileWords + r % 16 * 16, i + r >= first && i + r < last ? narrow_pair(p + (i + r) * 64 + 32 * k) : _mm512_setzero_si512());
      last - i <= kTileRows ? block_values<1>(D, o + i * 64) : block_values<2>(D, o + i * 64);
    }
    for (uint32_t d = 0; start < first && d < D; d += 64) std::memcpy(o + (d / 64 * queries + start) * 64, kept_ + d * kBlockN, (first - start) * 256);
  }

 private:
  static constexpr uint64_t kStride = 256;  // bytes from one row of scores or outputs to the next

  template <uint32_t N, uint32_t T> static void block_scores(const uint32_t* a, const uint32_t* b, uint32_t depth, float* s) {
    zero_sums<N, T>();
    for (uint32_t k = 0; k < depth; k++, a += 2 * kTileWords, b += 2 * kTileWords) multiply_step<N, T>(a, b, [](uint32_t) {});
    tile_store<0>(s, kStride);
    if constexpr (T > 1) tile_store<1>(s + 16, kStride);
    if constexpr (N > 1) tile_store<2>(s + 16 * 64, kStride);
    if constexpr (N > 1 && T > 1) tile_store<3>(s + 16 * 64 + 16, kStride);
  }

  // Tiles 4 to 7: probabilities of 32 keys and 16 queries, 2 k + n; 0 and 1: outputs; 2 and 3: values.
  template <uint32_t N> void block_values(uint32_t D, float* o) {
    tile_load<4>(p_);
    tile_load<6>(p_ + 2 * kTileWords);
    if constexpr (N > 1) {
      tile_load<5>(p_ + kTileWords);
      tile_load<7>(p_ + 3 * kTileWords);
    }
    for (uint32_t d = 0; d < D; d += 16) {
      float* c = o + d / 64 * queries * 64 + d % 64;
      const uint32_t* b = kv_ + d / 16 * 2 * kTileWords;
      tile_load<2>(b);
      tile_load<3>(b + kTileWords);
      tile_load<0>(c, kStride);
      tile_multiply<0, 4, 2>();
      if constexpr (N > 1) {
        tile_load<1>(c + 16 * 64, kStride);
        tile_multiply<1, 5, 2>();
      }
      tile_multiply<0, 6, 3>();
      if constexpr (N > 1) tile_multiply<1, 7, 3>();
      tile_store<0>(c, kStride);
      if constexpr (N > 1) tile_store<1>(c + 16 * 64, kStride);
    }
  }

  // Tiles [D/16][2][16 pairs of keys][16 of D].
  void pack_values(const Bf16* v, uint32_t count, uint32_t D) {
    for (uint32_t k = 0; k < 64; k += 2)
      for (uint32_t d = 0; d < D; d += 16) {
        const U even = k < count ? load_u16(v + k * D + d) : splatu(0), odd = k + 1 < count ? load_u16(v + (k + 1) * D + d) : splatu(0);
        _mm512_store_si512(kv_ + (d / 16 * 2 + k / 32) * kTileWords + k % 32 / 2 * 16, oru(even, shl<16>(odd)).v);
      }
  }

  alignas(64) uint32_t q_[queries * kHeadPanels * 32], kv_[64 * kHeadPanels * 32], p_[4 * kTileWords];
  alignas(64) float kept_[kBlockN * kHeadPanels * 64];
};

}  // namespace lily::cpu::LILY_CPU_NS
