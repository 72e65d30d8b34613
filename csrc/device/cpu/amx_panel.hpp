// What products on tiles share: rows packed as second operand, and one step of two by two tiles of sums.
#pragma once
#include "device/cpu/amx_tiles.hpp"
#include "device/cpu/gemm_tile.hpp"

namespace lily::cpu::LILY_CPU_NS {

constexpr uint32_t kBlockN = 32, kBlockT = 32;  // outputs and rows of the tiles that are summed at once

// Packed rows: tiles [rows/32][K/32][2][16 pairs of k][16 rows]; rows past the last one are zeros.
struct Panel {
  uint32_t* word;
  uint32_t rows, depth;  // depth in tiles

  uint32_t blocks() const { return (rows + kBlockT - 1) / kBlockT; }
  bool single(uint32_t block) const { return rows - block * kBlockT <= kTileRows; }
  const uint32_t* tiles(uint32_t block) const { return word + uint64_t(block) * depth * 2 * kTileWords; }

  // Rows t0.. of x.
  void pack(const RowSource<Bf16>& x, uint32_t t0) {
    const uint32_t count = rows;
    for (uint32_t r = 0; r < count; r += kTileRows) {
      uint32_t* out = word + (uint64_t(r / kBlockT) * depth * 2 + r / kTileRows % 2) * kTileWords;
      for (uint32_t k = 0; k < depth; k++, out += 2 * kTileWords) {
        const __mmask16 real = 32 * k + 32 <= x.K ? 0xffff : 0x00ff;  // K is a multiple of 16: the last tile may be half a one
        U v[16];
        for (uint32_t i = 0; i < 16; i++) {
          const Bf16* row = x.row(t0 + smaller(r + i, count - 1)) + 32 * k;
          __builtin_prefetch(row + 64, 0, 2);
          v[i] = {_mm512_maskz_loadu_epi32(r + i < count ? real : __mmask16(0), row)};
        }
        transpose16(v);
        for (uint32_t i = 0; i < 16; i++) _mm512_store_si512(out + 16 * i, v[i].v);
      }
    }
  }
};

// Tiles 0-3: sums of output tile n and row tile t in 2n + t; 4 and 5: weights; 6 and 7: rows.
template <uint32_t N, uint32_t T> LILY_INLINE void zero_sums() {
  tile_zero<0>();
  if constexpr (T > 1) tile_zero<1>();
  if constexpr (N > 1) tile_zero<2>();
  if constexpr (N > 1 && T > 1) tile_zero<3>();
}
// One step of k for up to 32 outputs and 32 rows; calls meanwhile(0..3) between the instructions.
template <uint32_t N, uint32_t T, class Meanwhile> LILY_INLINE void multiply_step(const uint32_t* a, const uint32_t* b, Meanwhile meanwhile) {
  tile_load<4>(a);
  meanwhile(0);
  tile_load<6>(b);
  meanwhile(1);
  tile_multiply<0, 4, 6>();
  if constexpr (N > 1) {
    tile_load<5>(a + kTileWords);
    tile_multiply<2, 5, 6>();
  }
  meanwhile(2);
  if constexpr (T > 1) {
    tile_load<7>(b + kTileWords);
    tile_multiply<1, 4, 7>();
  }
  if constexpr (N > 1 && T > 1) tile_multiply<3, 5, 7>();
  meanwhile(3);
}

}  // namespace lily::cpu::LILY_CPU_NS
