// The matrix product of prefill on tiles, with the sums of gemm_tile.hpp: 32 outputs times 32 rows, two by two tiles of sums that stay in
// registers for the whole of K. A = weights, 32 outputs x K dequantised to bf16 (no transposition: a look-up of 16 values per group);
// B = rows, packed once for all outputs of a range as pairs of k. Both lie in second-level cache.
// A tile instruction holds up the instructions behind it, the more so while the core is shared with another thread of its machine. So there are
// as few as possible, eight for four products, and dequantising the weights that come next is spread between them.
#pragma once
#include <cstdlib>

#include "device/cpu/amx_dequantise.hpp"
#include "device/cpu/amx_panel.hpp"

namespace lily::cpu::LILY_CPU_NS {

constexpr uint32_t kPanelValues = 512 * 1024;  // bf16 values of packed rows: 1 MiB
constexpr uint32_t kAhead = 2;                 // pairs of tiles that are dequantised before they are multiplied

// Rows that one panel holds, a power of two.
LILY_INLINE uint32_t panel_rows(uint32_t K) {
  uint32_t rows = kPassRows;
  while (rows > kBlockT && uint64_t(rows) * K > kPanelValues) rows /= 2;
  return rows;
}

// Which rows a panel holds, while the kernel that packed them runs.
struct Packed {
  const void *x = nullptr, *index = nullptr;
  uint32_t K = 0, first = 0, rows = 0;
  bool operator==(const Packed&) const = default;
};
LILY_INLINE Packed packed_of(const RowSource<Bf16>& x, uint32_t first, uint32_t rows) { return {x.x, x.row_of, uint32_t(x.K), first, rows}; }

// What a thread keeps from one product to the next.
struct TileScratch {
  uint32_t* a = nullptr;    // dequantised weights
  uint32_t* b = nullptr;    // packed rows
  float* groups = nullptr;  // scales and biases
  uint32_t K = 0;
  Packed packed;            // what b holds

  TileScratch() = default;
  TileScratch(const TileScratch&) = delete;
  ~TileScratch() { std::free(a); }

  static TileScratch& of_thread() {
    static thread_local TileScratch scratch;
    return scratch;
  }
  // Null when there is no memory for it.
  static TileScratch* get(uint32_t K) {
    TileScratch& scratch = of_thread();
    return K <= scratch.K || scratch.grow(round_up(K, 1024)) ? &scratch : nullptr;
  }

 private:
  bool grow(uint32_t depth) {
    constexpr uint64_t kPage = 2 << 20;
    const uint64_t a_bytes = uint64_t(depth) * kBlockN * 2, b_bytes = (depth * kBlockT > kPanelValues ? depth * kBlockT : kPanelValues) * 2ull;
    std::free(a);
    a = static_cast<uint32_t*>(std::aligned_alloc(kPage, (a_bytes + b_bytes + uint64_t(depth) / 64 * 2 * kBlockN * sizeof(float) + kPage - 1) / kPage * kPage));
    b = a + a_bytes / 4;
    groups = reinterpret_cast<float*>(b + b_bytes / 4);
    K = a ? depth : 0;
    packed = {};
    return a;
  }
};

template <uint32_t N, uint32_t T> LILY_INLINE void store_sums(float* c) {
  tile_store<0>(c);
  if constexpr (T > 1) tile_store<1>(c + kTileWords);
  if constexpr (N > 1) tile_store<2>(c + 2 * kTileWords);
  if constexpr (N > 1 && T > 1) tile_store<3>(c + 3 * kTileWords);
}

// Pairs [from, to) of tiles of k. Meanwhile the pairs from `target` on are dequantised, one for each.
template <uint32_t N, uint32_t T, bool filling>
LILY_INLINE void multiply_pairs(const uint32_t* a, const uint32_t* b, uint32_t depth, uint32_t from, uint32_t to, Fill& fill, uint32_t target) {
  for (uint32_t pair = from; pair < to; pair++, target++)
    for (uint32_t k = 2 * pair, row = 0; k < smaller(2 * pair + 2, depth); k++, row += 8 * N)
      multiply_step<N, T>(a + uint64_t(k) * 2 * kTileWords, b + uint64_t(k) * 2 * kTileWords, [&](uint32_t quarter) __attribute__((always_inline)) {
        if constexpr (filling) fill.part(target, row + 2 * N * quarter, row + 2 * N * (quarter + 1));
      });
}

// Where a block of 32 rows stands in its panel: the first one dequantises the weights of all, the last one begins with those of the next outputs.
struct Turn {
  bool first, last;
  Block next;
};

// All of K. What is dequantised meanwhile comes `kAhead` pairs later.
template <uint32_t N, uint32_t T> static void multiply_block(const uint32_t* a, const uint32_t* b, uint32_t depth, const Turn& turn, Fill& fill, float* c) {
  const uint32_t pairs = (depth + 1) / 2, filled = pairs > kAhead ? pairs - kAhead : 0;
  zero_sums<N, T>();
  if (turn.first)
    multiply_pairs<N, T, true>(a, b, depth, 0, filled, fill, kAhead);
  else
    multiply_pairs<N, T, false>(a, b, depth, 0, filled, fill, 0);
  if (turn.last && turn.next.rows == N * kTileRows && depth >= 4 * kAhead && depth % 2 == 0) {
    fill.start(turn.next);
    multiply_pairs<N, T, true>(a, b, depth, filled, pairs, fill, 0);
    fill.begun = kAhead;
  } else {
    multiply_pairs<N, T, false>(a, b, depth, filled, pairs, fill, 0);
  }
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
static void multiply_panel_rows(const Block& block, const Block& next, const Panel& x, const uint32_t* a, Fill& fill, uint32_t n0, float* acc) {
  alignas(64) float c[4 * kTileWords];
  if (!fill.begun) fill.start(block);
  for (uint32_t pair = fill.begun; pair < kAhead && 2 * pair < x.depth; pair++) fill.all(pair);
  fill.begun = 0;
  const bool narrow = block.rows <= kTileRows;
  for (uint32_t b = 0; b < x.blocks(); b++) {
    const bool single = x.single(b);
    auto run = narrow ? (single ? multiply_block<1, 1> : multiply_block<1, 2>) : (single ? multiply_block<2, 1> : multiply_block<2, 2>);
    run(a, x.tiles(b), x.depth, {b == 0, b + 1 == x.blocks(), next}, fill, c);
    for (uint32_t i = 0; i < 4; i++)
      if ((i < 2 || !narrow) && (i % 2 == 0 || !single)) spread_sums(c + i * kTileWords, acc + (b * kBlockT + i % 2 * 16) * kTileN + n0 + i / 2 * 16);
  }
}

}  // namespace lily::cpu::LILY_CPU_NS
