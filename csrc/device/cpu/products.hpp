// Walks the outputs and rows of a matrix product of prefill: on tiles where the variant has them, else on vectors. The sums are the same.
#pragma once
#if defined(LILY_AMX)
#include "device/cpu/amx_product.hpp"
#else
#include "device/cpu/gemm_tile.hpp"
#endif

namespace lily::cpu::LILY_CPU_NS {

// Tiles of outputs [begin, end) of one weight (S = 1) or of a pair (S = 2), for rows [first, last) of x.
template <class Act, uint32_t S> struct Product {
  RowSource<Act> x;
  uint32_t first, last, begin, end, N;
  struct Operand {
    const Weight* w;
    uint64_t row;  // of output 0
  } operand[S];

  Column column(uint32_t tile, uint32_t s) const { return tile_column(*operand[s].w, operand[s].row, tile, N); }
};

// Calls compute(block, tile, tiles) for every block of rows (or expert) that threadgroups [begin, end) touch, and its tiles of outputs among
// them: threadgroup g is tile g % ceil(N/64) of block g / ceil(N/64).
template <class Compute> LILY_INLINE void for_each_block(uint32_t begin, uint32_t end, uint32_t N, Compute compute) {
  const uint32_t tiles = (N + kTileN - 1) / kTileN;
  for (uint32_t g = begin, count; g < end; g += count) {
    const uint32_t tile = g % tiles;
    count = smaller(end - g, tiles - tile);
    compute(g / tiles, tile, tile + count);
  }
}

// Calls done(tile, t, rows, acc) for every tile of outputs and block of rows t..t+rows: acc[s * kAccFloats + r * kTileN + j] belongs to output j of the tile.
template <class Act, uint32_t S, class Done> static void vector_products(const Product<Act, S>& p, Done done) {
  constexpr uint32_t kTogether = kColumns / S;
  alignas(64) float acc[kColumns * kAccFloats];
  for (uint32_t tile = p.begin; tile < p.end; tile += kTogether) {
    const uint32_t count = smaller(kTogether, p.end - tile);
    Column columns[kColumns];
    for (uint32_t i = 0; i < count * S; i++) columns[i] = p.column(tile + i / S, i % S);
    for (uint32_t t = p.first; t < p.last; t += kPassRows) {
      const uint32_t rows = smaller(kPassRows, p.last - t);
      tile_product(columns, count * S, p.x, t, rows, acc);
      for (uint32_t i = 0; i < count; i++) done(tile + i, t, rows, acc + i * S * kAccFloats);
    }
  }
}

#if defined(LILY_AMX)
// The blocks of 32 outputs of a product in the order of work: tiles of outputs, operands, halves of a tile.
template <uint32_t S> struct Walk {
  const Product<Bf16, S>& p;
  uint32_t tile, s = 0, n0 = 0;

  uint32_t outputs() const { return smaller(kTileN, p.N - tile * kTileN); }
  bool ends_tile() const { return n0 + kBlockN >= outputs() && s + 1 == S; }
  Block block() const {
    if (tile >= p.end) return {};
    const uint32_t left = outputs() - n0;
    return {p.operand[s].w, p.operand[s].row + uint64_t(tile) * kTileN + n0, left - 1, left > kTileRows ? kBlockN : kTileRows};
  }
  Walk next() const {
    if (n0 + kBlockN < outputs()) return {p, tile, s, n0 + kBlockN};
    return s + 1 < S ? Walk{p, tile, s + 1} : Walk{p, tile + 1};
  }
};

template <uint32_t S, class Done> static void tile_products(const Product<Bf16, S>& p, TileScratch& scratch, Done done) {
  alignas(64) float acc[S * kAccFloats];
  const uint32_t pass = panel_rows(uint32_t(p.x.K));
  TileSession tiles;
  for (uint32_t t = p.first, rows; t < p.last; t += rows) {
    rows = smaller(pass, p.last - t);
    const Packed wanted = packed_of(p.x, t, rows);
    Panel panel{scratch.b, rows, uint32_t((p.x.K + 31) / 32)};
    if (scratch.packed != wanted) panel.pack(p.x, t);
    scratch.packed = wanted;
    Fill fill(scratch.a, scratch.groups);
    for (uint32_t tile = p.begin; tile < p.end; tile++) {
      bool more = true;
      for (Walk<S> at{p, tile}; more;) {
        const Walk<S> next = at.next();
        multiply_panel_rows(at.block(), next.block(), panel, scratch.a, fill, at.n0, acc + at.s * kAccFloats);
        more = !at.ends_tile();
        at.s = next.s, at.n0 = next.n0;
      }
      done(tile, t, rows, acc);
    }
  }
}
#endif

// Runs compute(begin, end) for one range of a kernel after the other. Rows packed for one of them stay for those that follow.
template <class Compute> LILY_INLINE void for_ranges(const KernelCall& c, uint32_t begin, uint32_t end, Compute compute) {
#if defined(LILY_AMX)
  TileScratch::of_thread().packed = {};
#endif
  do compute(begin, end);
  while (next_range(c, begin, end));
}

// Rows of x that are multiplied with one output after the other: those that a thread keeps packed.
template <class Act> LILY_INLINE uint32_t rows_together(uint32_t K) {
#if defined(LILY_AMX)
  if (sizeof(Act) == sizeof(Bf16)) return panel_rows(K);
#endif
  (void)K;
  return kPassRows;
}

template <class Act, uint32_t S, class Done> LILY_INLINE void products(const Product<Act, S>& p, Done done) {
#if defined(LILY_AMX)
  if constexpr (sizeof(Act) == sizeof(Bf16))
    if (TileScratch* scratch = TileScratch::get(uint32_t(p.x.K))) return tile_products(p, *scratch, done);
#endif
  vector_products(p, done);
}

// Rows of a = round(silu(gate) * up), of width N, from the sums of a pair.
template <class Act> LILY_INLINE void swiglu(const float* gate, const float* up, uint32_t n, Act* out) {
  for (uint32_t i = 0; i < n; i += 16) store_n(out + i, mul(silu(load_n(gate + i, n - i)), load_n(up + i, n - i)), n - i);
}
template <class Act> LILY_INLINE void pair_products(const Product<Act, 2>& p, Act* a) {
  products(p, [&](uint32_t tile, uint32_t t, uint32_t rows, const float* acc) {
    const uint32_t n = smaller(kTileN, p.N - tile * kTileN);
    for (uint32_t r = 0; r < rows; r++) swiglu(acc + r * kTileN, acc + kAccFloats + r * kTileN, n, a + uint64_t(t + r) * p.N + tile * kTileN);
  });
}

}  // namespace lily::cpu::LILY_CPU_NS
