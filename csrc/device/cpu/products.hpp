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
// The patches of a product in the order of work: tiles of outputs, operands, blocks of 32 outputs, steps of K.
template <uint32_t S> struct Walk {
  const Product<Bf16, S>& p;
  uint32_t tile, s = 0, n0 = 0, k = 0;

  uint32_t outputs() const { return smaller(kTileN, p.N - tile * kTileN); }
  bool ends_block() const { return k + kStepK >= p.x.K; }
  bool ends_tile() const { return ends_block() && n0 + kBlockN >= outputs() && s + 1 == S; }
  Patch patch() const {
    if (tile >= p.end) return {p.operand[0].w, 0, 0, 0, 0, 0};
    const uint32_t left = outputs() - n0;
    return {p.operand[s].w, p.operand[s].row + uint64_t(tile) * kTileN + n0, left - 1, left > kTileRows ? kBlockN : kTileRows, k, smaller(kStepK, uint32_t(p.x.K) - k)};
  }
  void advance() {
    if (!ends_block()) {
      k += kStepK;
      return;
    }
    k = 0;
    n0 += kBlockN;
    if (n0 < outputs()) return;
    n0 = 0;
    if (++s < S) return;
    s = 0;
    tile++;
  }
};

template <uint32_t S, class Done> static void tile_products(const Product<Bf16, S>& p, Done done) {
  alignas(64) float acc[S * kAccFloats];
  TileScratch scratch;
  Panel panel;
  TileSession tiles;
  const uint32_t pass = panel_rows(uint32_t(p.x.K));
  for (uint32_t t = p.first, rows; t < p.last; t += rows) {
    rows = smaller(pass, p.last - t);
    panel.pack(p.x, t, rows);
    Walk<S> at{p, p.begin}, next = at;
    Fill(at.patch(), scratch.a[0]).all();
    for (uint32_t turn = 0; at.tile < p.end; turn ^= 1, at.tile = next.tile, at.s = next.s, at.n0 = next.n0, at.k = next.k) {
      next.advance();
      Fill fill(next.patch(), scratch.a[turn ^ 1]);
      multiply_patch(at.patch(), scratch.a[turn], panel, scratch.c, fill);
      if (at.ends_block()) spread_patch(at.patch(), panel, scratch.c, at.n0, acc + at.s * kAccFloats);
      if (at.ends_tile()) done(at.tile, t, rows, acc);
    }
  }
}
#endif

template <class Act, uint32_t S, class Done> LILY_INLINE void products(const Product<Act, S>& p, Done done) {
#if defined(LILY_AMX)
  if constexpr (sizeof(Act) == sizeof(Bf16)) return tile_products(p, done);
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
