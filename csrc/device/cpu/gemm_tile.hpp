// The matrix product of prefill: y[t][n] for up to 64 outputs n and any number of rows t, y = x W^T with W rounded to the activation storage.
// Order of sums (contract, whatever the row count): blocks of 32 of K in order; in a block the even and the odd products are two
// chains from zero, then acc += even + odd. acc passes through memory between blocks, which keeps its bits.
// 128 of K at a time are dequantised into a tile wt[k][64] (lane = output), then all rows are multiplied with it, a few at a time.
#pragma once
#include "device/cpu/weight.hpp"

namespace lily::cpu::LILY_CPU_NS {

constexpr uint32_t kTileN = 64;    // outputs of a threadgroup
constexpr uint32_t kTileK = 128;   // depth of the dequantised tile
constexpr uint32_t kPanelK = 64;   // depth multiplied at once: 64 x 64 weights and the rows' panel fit the first-level cache
#if defined(__AVX512F__)
constexpr uint32_t kRows = 6, kVectors = 2;  // rows x vectors x (even, odd) accumulators: 24 of 32 registers
#elif defined(__AVX2__)
constexpr uint32_t kRows = 3, kVectors = 1;  // 12 of 16 (a vector is two registers)
#else
constexpr uint32_t kRows = 2, kVectors = 1;
#endif

// 16 x 16 words: r[i] lane j becomes r[j] lane i.
LILY_INLINE void transpose16(U r[16]) {
#if defined(__AVX512F__)
  __m512i a[16], b[16];
  LILY_UNROLL for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_epi32(r[i].v, r[i + 1].v);
    a[i + 1] = _mm512_unpackhi_epi32(r[i].v, r[i + 1].v);
  }
  LILY_UNROLL for (int i = 0; i < 16; i += 4) {
    b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
    b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
    b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
    b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
  }
  // b[4q + c] holds column 4p + c of rows 4q..4q+3 in its 128-bit part p
  LILY_UNROLL for (int c = 0; c < 4; c++) {
    __m512i even01 = _mm512_shuffle_i32x4(b[c], b[4 + c], 0x88), odd01 = _mm512_shuffle_i32x4(b[c], b[4 + c], 0xdd);
    __m512i even23 = _mm512_shuffle_i32x4(b[8 + c], b[12 + c], 0x88), odd23 = _mm512_shuffle_i32x4(b[8 + c], b[12 + c], 0xdd);
    r[c].v = _mm512_shuffle_i32x4(even01, even23, 0x88);
    r[8 + c].v = _mm512_shuffle_i32x4(even01, even23, 0xdd);
    r[4 + c].v = _mm512_shuffle_i32x4(odd01, odd23, 0x88);
    r[12 + c].v = _mm512_shuffle_i32x4(odd01, odd23, 0xdd);
  }
#else
  uint32_t t[16][16];
  for (int i = 0; i < 16; i++) std::memcpy(t[i], &r[i], 64);
  for (int i = 0; i < 16; i++)
    for (int j = 0; j < i; j++) {
      uint32_t u = t[i][j];
      t[i][j] = t[j][i];
      t[j][i] = u;
    }
  for (int i = 0; i < 16; i++) std::memcpy(&r[i], t[i], 64);
#endif
}

// The bf16 values of one group of 16 rows, a lane each.
LILY_INLINE V row_values(const uint8_t* const row[16], uint32_t group) {
  uint32_t t[16];
  for (int i = 0; i < 16; i++) t[i] = uint32_t(load_any<uint16_t>(row[i] + 2 * group)) << 16;
  return from_bits(loadu(t));
}

// Sixteen rows of the tile: where their parts start.
struct Strip {
  const uint8_t *codes[16], *scales[16], *biases[16];
};

// Codes of 4 or 8 bits, groups of 64: 16 words of each row are transposed, so that a lane is a row, then taken apart.
template <class Act, uint32_t width> static void dequantise_strip(const Strip& s, uint32_t k0, uint32_t kn, float* wt) {
  constexpr uint32_t per_word = 32 / width, span = 16 * per_word;
  for (uint32_t k = 0; k < kn; k += span) {
    const uint32_t words = smaller(16, (kn - k) / per_word);
    const uint64_t at = uint64_t(k0 + k) * width / 8;
    U c[16];
    for (int i = 0; i < 16; i++) {
      if (words == 16) {
        c[i] = loadu(s.codes[i] + at);
        __builtin_prefetch(s.codes[i] + at + kTileK * width / 8);
      } else {
        uint8_t part[64] = {};
        std::memcpy(part, s.codes[i] + at, 32);
        c[i] = loadu(part);
      }
    }
    transpose16(c);
    for (uint32_t j = 0; j < words * per_word; j += 64) {
      const V scale = row_values(s.scales, (k0 + k + j) / 64), bias = row_values(s.biases, (k0 + k + j) / 64);
      float* out = wt + (k + j) * kTileN;
      for (uint32_t d = j / per_word; d < (j + 64) / per_word; d++)
        LILY_UNROLL for (uint32_t i = 0; i < per_word; i++, out += kTileN) {
          V q = to_float(andu(shrv(c[d], splatu(i * width)), splatu((1u << width) - 1)));
          store(out, round_act<Act>(fma(scale, q, bias)));
        }
    }
  }
}

// Any other format: 16 values of each row, then transposed.
template <class Act> static void unpack_strip(const Weight& w, const Strip& s, uint32_t k0, uint32_t kn, float* wt) {
  const CodeReader reader(w.fmt.kind == LILY_W_AFFINE ? w.fmt.bits : 8);
  for (uint32_t k = 0; k < kn; k += 16) {
    const uint32_t j = k0 + k;
    U c[16];
    for (int i = 0; i < 16; i++) {
      V v;
      if (w.fmt.kind == LILY_W_AFFINE) {
        uint32_t at = j / w.fmt.group * 2;
        v = fma(splat(bf16_at(s.scales[i] + at)), reader.read(s.codes[i], w.row_bytes, j), splat(bf16_at(s.biases[i] + at)));
      } else if (w.fmt.kind == LILY_W_F32) {
        v = from_bits(loadu(s.codes[i] + uint64_t(j) * 4));
      } else {
        v = w.fmt.kind == LILY_W_BF16 ? load_bf16(s.codes[i] + uint64_t(j) * 2) : load_f16(s.codes[i] + uint64_t(j) * 2);
      }
      c[i] = bits(round_act<Act>(v));
    }
    transpose16(c);
    for (int i = 0; i < 16; i++) store(wt + (k + i) * kTileN, from_bits(c[i]));
  }
}

// wt[k][0..n) = rows first..first+n of w, k in [k0, k0+kn); lanes past n repeat the last row.
template <class Act> static void dequantise_tile(const Weight& w, uint64_t first, uint32_t n, uint32_t k0, uint32_t kn, float* wt) {
  for (uint32_t n0 = 0; n0 < round_up(n, 16 * kVectors); n0 += 16) {
    Strip s;
    for (uint32_t i = 0; i < 16; i++) {
      uint64_t r = first + smaller(n0 + i, n - 1);
      s.codes[i] = w.row(r);
      s.scales[i] = w.row_scales(r);
      s.biases[i] = w.row_biases(r);
    }
    if (w.fast(4)) dequantise_strip<Act, 4>(s, k0, kn, wt + n0);
    else if (w.fast(8)) dequantise_strip<Act, 8>(s, k0, kn, wt + n0);
    else unpack_strip<Act>(w, s, k0, kn, wt + n0);
  }
}

// acc[r][..] += x[r] wt for R rows and kVectors vectors of outputs; kn is a multiple of 32.
template <uint32_t R> static void multiply(float* acc, const float* x, const float* wt, uint32_t kn) {
  for (uint32_t k0 = 0; k0 < kn; k0 += 32, x += 32, wt += 32 * kTileN) {
    V even[R][kVectors], odd[R][kVectors];
    LILY_UNROLL for (uint32_t r = 0; r < R; r++)
      LILY_UNROLL for (uint32_t v = 0; v < kVectors; v++) even[r][v] = odd[r][v] = zero();
    for (uint32_t k = 0; k < 32; k += 2) {
      V a[kVectors], b[kVectors];
      LILY_UNROLL for (uint32_t v = 0; v < kVectors; v++) a[v] = load(wt + k * kTileN + 16 * v), b[v] = load(wt + (k + 1) * kTileN + 16 * v);
      LILY_UNROLL for (uint32_t r = 0; r < R; r++) {
        V p = splat(x[r * kPanelK + k]), q = splat(x[r * kPanelK + k + 1]);
        LILY_UNROLL for (uint32_t v = 0; v < kVectors; v++) even[r][v] = fma(p, a[v], even[r][v]), odd[r][v] = fma(q, b[v], odd[r][v]);
      }
    }
    LILY_UNROLL for (uint32_t r = 0; r < R; r++)
      LILY_UNROLL for (uint32_t v = 0; v < kVectors; v++) {
        float* at = acc + r * kTileN + 16 * v;
        store(at, add(load(at), add(even[r][v], odd[r][v])));
      }
  }
}

template <uint32_t R> static void multiply_rows(uint32_t rows, float* acc, const float* x, const float* wt, uint32_t kn) {
  if (rows == R) return multiply<R>(acc, x, wt, kn);
  if constexpr (R > 1) multiply_rows<R - 1>(rows, acc, x, wt, kn);
}

// Which rows of x a product takes: rows t0, t0+1, .. or, through a list, row_of[t0], row_of[t0+1], ..
template <class Act> struct RowSource {
  const Act* x;
  const uint32_t* row_of;
  uint64_t K;
  const Act* row(uint32_t t) const { return x + (row_of ? row_of[t] : t) * K; }
};

// acc[i][0..64) = rows t0+i of x times outputs first..first+n of w, i < rows. acc holds rows x 64 floats.
template <class Act>
static void tile_product(const Weight& w, uint64_t first, uint32_t n, const RowSource<Act>& x, uint32_t t0, uint32_t rows, float* acc) {
  alignas(64) float wt[kTileK * kTileN], panel[kRows * kPanelK];
  std::memset(acc, 0, uint64_t(rows) * kTileN * sizeof(float));
  for (uint32_t k0 = 0; k0 < w.K; k0 += kTileK) {
    const uint32_t tile_k = smaller(kTileK, w.K - k0);
    dequantise_tile<Act>(w, first, n, k0, tile_k, wt);
    for (uint32_t k = 0; k < tile_k; k += kPanelK) {
      const uint32_t kn = smaller(kPanelK, tile_k - k);
      for (uint32_t i = 0; i < rows; i += kRows) {
        const uint32_t count = smaller(kRows, rows - i);
        for (uint32_t r = 0; r < count; r++) {
          const Act* row = x.row(t0 + i + r) + k0 + k;
          for (uint32_t j = 0; j < kn; j += 16) store(panel + r * kPanelK + j, load(row + j));
        }
        for (uint32_t v = 0; v < n; v += 16 * kVectors) multiply_rows<kRows>(count, acc + i * kTileN + v, panel, wt + k * kTileN + v, kn);
      }
    }
  }
}

// out[0..n) = round(silu(gate) * up).
template <class Act> LILY_INLINE void swiglu(const float* gate, const float* up, uint32_t n, Act* out) {
  for (uint32_t i = 0; i < n; i += 16) store_n(out + i, mul(silu(load_n(gate + i, n - i)), load_n(up + i, n - i)), n - i);
}

}  // namespace lily::cpu::LILY_CPU_NS
