// The matrix product of prefill on tiles, with the sums of gemm_tile.hpp: 32 outputs times 32 rows, two by two tiles of sums that stay in
// registers for the whole of K. A = weights, 32 outputs x K dequantised to bf16 (no transposition: a look-up of 16 values per group);
// B = rows, packed once for all outputs of a range as pairs of k. Both lie in second-level cache.
// A tile instruction holds up the instructions behind it, the more so while the core is shared with another thread of its machine. So there are
// as few as possible, eight for four products, and dequantising the weights that come next is spread between them.
#pragma once
#include <cstdlib>

#include "device/cpu/amx_dequantise.hpp"

namespace lily::cpu::LILY_CPU_NS {

constexpr uint32_t kPanelValues = 512 * 1024;  // bf16 values of packed rows: 1 MiB
constexpr uint32_t kAhead = 2;                 // pairs of tiles that are dequantised before they are multiplied

// Rows that one panel holds.
LILY_INLINE uint32_t panel_rows(uint32_t K) {
  const uint32_t fit = smaller(kPassRows, kPanelValues / K / kBlockT * kBlockT);
  return fit ? fit : kBlockT;
}

// What a thread keeps from one product to the next.
class TileScratch {
 public:
  uint32_t* a;    // dequantised weights
  float* groups;  // their scales and biases
  uint32_t* b;    // packed rows

  static TileScratch& get(uint32_t K) {
    static thread_local TileScratch scratch;
    if (K > scratch.K_) scratch.grow(K);
    return scratch;
  }
  ~TileScratch() { std::free(a); }

 private:
  TileScratch() : a(nullptr), groups(nullptr), b(nullptr) {}
  void grow(uint32_t K) {
    const uint64_t depth = round_up(K, kPairK), a_bytes = depth * kBlockN * 2, b_bytes = uint64_t(panel_rows(K)) * depth * 2 + kPanelValues * 2, group_bytes = depth / 16 * 64 * 4;
    std::free(a);
    constexpr uint64_t kPage = 2 << 20;
    uint8_t* p = static_cast<uint8_t*>(std::aligned_alloc(kPage, (a_bytes + b_bytes + group_bytes + kPage - 1) / kPage * kPage));
    if (!p) __builtin_trap();
    a = reinterpret_cast<uint32_t*>(p);
    b = reinterpret_cast<uint32_t*>(p + a_bytes);
    groups = reinterpret_cast<float*>(p + a_bytes + b_bytes);
    K_ = K;
  }
  uint32_t K_ = 0;
};

// Packed rows: tiles [rows/32][K/32][2][16 pairs of k][16 rows]; rows past the last one are zeros.
struct Panel {
  uint32_t* word;
  uint32_t rows, depth;  // depth in tiles

  uint32_t blocks() const { return (rows + kBlockT - 1) / kBlockT; }
  bool single(uint32_t block) const { return rows - block * kBlockT <= kTileRows; }
  const uint32_t* tiles(uint32_t block) const { return word + uint64_t(block) * depth * 2 * kTileWords; }

  void pack(const RowSource<Bf16>& x, uint32_t t0, uint32_t count) {
    rows = count;
    depth = uint32_t((x.K + 31) / 32);
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
template <uint32_t N, uint32_t T> LILY_INLINE void store_sums(float* c) {
  tile_store<0>(c);
  if constexpr (T > 1) tile_store<1>(c + kTileWords);
  if constexpr (N > 1) tile_store<2>(c + 2 * kTileWords);
  if constexpr (N > 1 && T > 1) tile_store<3>(c + 3 * kTileWords);
}

// Sums of up to 32 outputs and 32 rows for the pairs [from, to) of tiles of k.
template <uint32_t N, uint32_t T, bool filling> LILY_INLINE void multiply_pairs(const uint32_t* a, const uint32_t* b, uint32_t depth, uint32_t from, uint32_t to, Fill& fill, uint32_t target) {
  for (uint32_t pair = from; pair < to; pair++, target++) {
    const uint32_t end = smaller(2 * pair + 2, depth);
    for (uint32_t k = 2 * pair; k < end; k++) {
      const uint32_t *at_a = a + uint64_t(k) * 2 * kTileWords, *at_b = b + uint64_t(k) * 2 * kTileWords;
      const uint32_t row = k % 2 * (8 * N);
      auto meanwhile = [&](uint32_t quarter) __attribute__((always_inline)) {
        if constexpr (filling) fill.part(target, row + 2 * N * quarter, row + 2 * N * (quarter + 1));
      };
      tile_load<4>(at_a);
      meanwhile(0);
      tile_load<6>(at_b);
      meanwhile(1);
      tile_multiply<0, 4, 6>();
      if constexpr (N > 1) {
        tile_load<5>(at_a + kTileWords);
        tile_multiply<2, 5, 6>();
      }
      meanwhile(2);
      if constexpr (T > 1) {
        tile_load<7>(at_b + kTileWords);
        tile_multiply<1, 4, 7>();
      }
      if constexpr (N > 1 && T > 1) tile_multiply<3, 5, 7>();
      meanwhile(3);
    }
  }
}

// All of K; the first rows of a panel meanwhile dequantise what comes `kAhead` pairs later.
template <uint32_t N, uint32_t T> static void multiply_block(const uint32_t* a, const uint32_t* b, uint32_t depth, bool first, Fill& fill, float* c) {
  const uint32_t pairs = (depth + 1) / 2, filled = pairs > kAhead ? pairs - kAhead : 0;
  zero_sums<N, T>();
  if (first)
    multiply_pairs<N, T, true>(a, b, depth, 0, filled, fill, kAhead);
  else
    multiply_pairs<N, T, false>(a, b, depth, 0, filled, fill, 0);
  multiply_pairs<N, T, false>(a, b, depth, filled, pairs, fill, 0);
  store_sums<N, T>(c);
}

// A tile of sums [16 outputs][16 rows] into acc[row][64].
LILY_INLINE void spread_sums(const float* c, float* acc) {
  U v[16];
  for (uint32_t i = 0; i < 16; i++) v[i] = loadu(c + 16 * i);
  transpose16(v);
  for (uint32_t i = 0; i < 16; i++) store(acc + i * kTileN, from_bits(v[i]));
}

// One block of outputs times all rows of a panel: sums into acc[row][64] from output n0 of the tile on.
static void multiply_panel_rows(const Block& block, const Panel& x, TileScratch& scratch, uint32_t n0, float* acc) {
  alignas(64) float c[4 * kTileWords];
  Fill fill(scratch.a, scratch.groups);
  fill.start(block);
  for (uint32_t pair = 0; pair < kAhead && 2 * pair < x.depth; pair++) fill.all(pair);
  const bool narrow = block.rows <= kTileRows;
  for (uint32_t b = 0; b < x.blocks(); b++) {
    const bool single = x.single(b);
    auto run = narrow ? (single ? multiply_block<1, 1> : multiply_block<1, 2>) : (single ? multiply_block<2, 1> : multiply_block<2, 2>);
    run(scratch.a, x.tiles(b), x.depth, b == 0, fill, c);
    for (uint32_t i = 0; i < 4; i++)
      if ((i < 2 || !narrow) && (i % 2 == 0 || !single)) spread_sums(c + i * kTileWords, acc + (b * kBlockT + i % 2 * 16) * kTileN + n0 + i / 2 * 16);
  }
}

}  // namespace lily::cpu::LILY_CPU_NS
