// The matrix product of prefill: y[t][n] for up to 64 outputs n and any number of rows t, y = x W^T with W rounded to the activation storage.
// Order of sums (contract, whatever the row count): blocks of 32 of K in order; in a block the even and the odd products are two
// chains from zero, then acc += even + odd; x86 in bf16 storage counts subnormals as zero. acc passes through memory between blocks, which keeps its bits.
// 64 of K at a time: the rows are converted to fp32 (second-level cache), a tile of weights is dequantised into wt[k][64] (lane = output;
// first-level cache), and all rows are multiplied with it, six at a time.
#pragma once
#include "device/cpu/flush.hpp"
#include "device/cpu/weight.hpp"

namespace lily::cpu::LILY_CPU_NS {

constexpr uint32_t kTileN = 64;      // outputs of a threadgroup
constexpr uint32_t kTileK = 64;      // depth of a tile
constexpr uint32_t kPassRows = 256;  // rows whose sums are kept while K is walked
constexpr uint32_t kColumns = 4;     // tiles of outputs that share the converted rows
constexpr uint32_t kAccFloats = kPassRows * kTileN;
#if defined(__AVX512F__)
constexpr uint32_t kRows = 6, kVectors = 4;  // 24 sums in 32 registers
#elif defined(__AVX2__)
constexpr uint32_t kRows = 6, kVectors = 1;  // 12 in 16: a vector is two registers
#elif defined(LILY_NEON)
constexpr uint32_t kRows = 6, kVectors = 1;  // 24 in 32: a vector is four registers
#else
constexpr uint32_t kRows = 2, kVectors = 1;
#endif
constexpr uint32_t kWidth = 16 * kVectors;  // outputs that are summed at once; the tile is stored as slices wt[k][kWidth]

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
#elif defined(LILY_NEON)
  uint32x4_t t[16][4];  // part q of row i after the transposition
  auto four = [&](int q, int p, uint32x4_t r0, uint32x4_t r1, uint32x4_t r2, uint32x4_t r3) {
    uint64x2_t even01 = vreinterpretq_u64_u32(vtrn1q_u32(r0, r1)), odd01 = vreinterpretq_u64_u32(vtrn2q_u32(r0, r1));
    uint64x2_t even23 = vreinterpretq_u64_u32(vtrn1q_u32(r2, r3)), odd23 = vreinterpretq_u64_u32(vtrn2q_u32(r2, r3));
    t[4 * p][q] = vreinterpretq_u32_u64(vtrn1q_u64(even01, even23));
    t[4 * p + 1][q] = vreinterpretq_u32_u64(vtrn1q_u64(odd01, odd23));
    t[4 * p + 2][q] = vreinterpretq_u32_u64(vtrn2q_u64(even01, even23));
    t[4 * p + 3][q] = vreinterpretq_u32_u64(vtrn2q_u64(odd01, odd23));
  };
  LILY_UNROLL for (int q = 0; q < 4; q++) {
    const U* x = r + 4 * q;
    four(q, 0, x[0].a, x[1].a, x[2].a, x[3].a);
    four(q, 1, x[0].b, x[1].b, x[2].b, x[3].b);
    four(q, 2, x[0].c, x[1].c, x[2].c, x[3].c);
    four(q, 3, x[0].d, x[1].d, x[2].d, x[3].d);
  }
  LILY_UNROLL for (int i = 0; i < 16; i++) r[i] = {t[i][0], t[i][1], t[i][2], t[i][3]};
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

// Sixteen rows of a weight.
struct Strip {
  const uint8_t *codes[16], *scales[16], *biases[16];
};

// 16 words of each row of a strip, transposed: lane = row.
struct Words {
  U word[16];
};

LILY_INLINE void load_words(const Strip& s, uint64_t at, uint64_t row_bytes, Words& out) {
  U c[16];
  if (row_bytes - at >= 64) {
    for (int i = 0; i < 16; i++) {
      c[i] = loadu(s.codes[i] + at);
      __builtin_prefetch(s.codes[i] + at + 64);
    }
  } else {
    for (int i = 0; i < 16; i++) {
      uint8_t part[64] = {};
      std::memcpy(part, s.codes[i] + at, 32);  // half of 128 codes: K is a multiple of 64 here
      c[i] = loadu(part);
    }
  }
  transpose16(c);
  for (int i = 0; i < 16; i++) out.word[i] = c[i];
}

// The codes of one word of each row: value k of the word to wt + k * kWidth.
template <class Act, uint32_t width> LILY_INLINE void unpack_word(U word, V scale, V bias, float* wt) {
  constexpr uint32_t per_word = 32 / width;
  LILY_UNROLL for (uint32_t i = 0; i < per_word; i++) {
    U c = shrv(word, splatu(i * width));
    V q;
#if defined(__AVX512F__)
    if constexpr (width == 4)
      q = permute(digits(), c);
    else
      q = to_float(andu(c, splatu(255)));
#else
    q = to_float(andu(c, splatu((1u << width) - 1)));
#endif
    store(wt + i * kWidth, round_act<Act>(fma(scale, q, bias)));
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
    for (int i = 0; i < 16; i++) store(wt + (k + i) * kWidth, from_bits(c[i]));
  }
}

// One tile of outputs: rows first..first+n of a weight, n at most 64.
struct Column {
  const Weight* w;
  uint64_t first;
  uint32_t n;
};

LILY_INLINE Column tile_column(const Weight& w, uint64_t first, uint32_t tile, uint32_t N) { return {&w, first + uint64_t(tile) * kTileN, smaller(kTileN, N - tile * kTileN)}; }

// wt = the column's weights for k in [k0, k0+kn), kn at most 64. Lanes past n repeat the last row; strips past n are left alone.
// `words` keeps the 128 codes of 4 bits that a transposition yields for the next call.
template <class Act> static void dequantise(const Column& column, uint32_t k0, uint32_t kn, Words* words, float* wt) {
  const Weight& w = *column.w;
  for (uint32_t n0 = 0; n0 < column.n; n0 += 16) {
    Strip s;
    for (uint32_t i = 0; i < 16; i++) {
      uint64_t r = column.first + smaller(n0 + i, column.n - 1);
      s.codes[i] = w.row(r);
      s.scales[i] = w.row_scales(r);
      s.biases[i] = w.row_biases(r);
    }
    float* out = wt + n0 / kWidth * (kTileK * kWidth) + n0 % kWidth;
    Words& staged = words[n0 / 16];
    if (w.fast(4)) {
      const uint32_t half = k0 % 128 / 8;
      if (!half) load_words(s, k0 / 2, w.row_bytes, staged);
      const V scale = row_values(s.scales, k0 / 64), bias = row_values(s.biases, k0 / 64);
      for (uint32_t d = 0; d < 8; d++) unpack_word<Act, 4>(staged.word[half + d], scale, bias, out + d * 8 * kWidth);
    } else if (w.fast(8)) {
      load_words(s, k0, w.row_bytes, staged);
      const V scale = row_values(s.scales, k0 / 64), bias = row_values(s.biases, k0 / 64);
      for (uint32_t d = 0; d < 16; d++) unpack_word<Act, 8>(staged.word[d], scale, bias, out + d * 4 * kWidth);
    } else {
      unpack_strip<Act>(w, s, k0, kn, out);
    }
  }
}

// s[r] = sum over every second k of 32 of x[r][k] * wt[k], ascending; meanwhile fetches 16 lines from `next`.
template <uint32_t R> LILY_INLINE void every_second(V s[R][kVectors], const float* x, const float* wt, const float* next) {
  LILY_UNROLL for (uint32_t r = 0; r < R; r++) LILY_UNROLL for (uint32_t v = 0; v < kVectors; v++) s[r][v] = fma(splat(x[r * kTileK]), load(wt + 16 * v), zero());
  for (uint32_t k = 2; k < 32; k += 2) {
    V w[kVectors];
    __builtin_prefetch(next + k * 8);
    LILY_UNROLL for (uint32_t v = 0; v < kVectors; v++) w[v] = load(wt + k * kWidth + 16 * v);
    LILY_UNROLL for (uint32_t r = 0; r < R; r++) {
      V p = splat(x[r * kTileK + k]);
      LILY_UNROLL for (uint32_t v = 0; v < kVectors; v++) s[r][v] = fma(p, w[v], s[r][v]);
    }
  }
}

// acc[r][..] += x[r] wt for R rows and kWidth outputs; kn is a multiple of 32. The next rows' x and acc lie behind these.
template <uint32_t R> static void multiply(float* acc, const float* x, const float* wt, uint32_t kn) {
  for (uint32_t k = 0; k < kn; k += 32) {
    V even[R][kVectors], odd[R][kVectors];
    every_second<R>(even, x + k, wt + k * kWidth, x + R * kTileK + k * 6);
    __asm__ volatile("" ::: "memory");  // keeps acc in memory: the registers are taken
    every_second<R>(odd, x + k + 1, wt + (k + 1) * kWidth, acc + R * kTileN + k * 6);
    LILY_UNROLL for (uint32_t r = 0; r < R; r++) LILY_UNROLL for (uint32_t v = 0; v < kVectors; v++) {
      float* at = acc + r * kTileN + 16 * v;
      store(at, add(load(at), add(even[r][v], odd[r][v])));
    }
  }
}

template <uint32_t R> static void multiply_rows(uint32_t rows, float* acc, const float* x, const float* wt, uint32_t kn) {
  if (rows == R) return multiply<R>(acc, x, wt, kn);
  if constexpr (R > 1) multiply_rows<R - 1>(rows, acc, x, wt, kn);
}

// All rows of a panel times a tile of weights.
template <class Act> static __attribute__((noinline)) void multiply_panel(uint32_t outputs, uint32_t rows, float* acc, const float* x, const float* wt, uint32_t kn) {
  for (uint32_t v = 0; v < outputs; v += kWidth)
    for (uint32_t r = 0; r < rows; r += kRows) multiply_rows<kRows>(smaller(kRows, rows - r), acc + r * kTileN + v, x + r * kTileK, wt + v * kTileK, kn);
}
// The same with subnormals as zero when the storage is bf16, as tile units have it.
template <class Act> LILY_INLINE void multiply_tile(uint32_t outputs, uint32_t rows, float* acc, const float* x, const float* wt, uint32_t kn) {
  if constexpr (sizeof(Act) == sizeof(Bf16)) {
    FlushSubnormals flush;
    multiply_panel<Act>(outputs, rows, acc, x, wt, kn);
  } else {
    multiply_panel<Act>(outputs, rows, acc, x, wt, kn);
  }
}

// Which rows of x a product takes: rows t0, t0+1, .. or, through a list, row_of[t0], row_of[t0+1], ..
template <class Act> struct RowSource {
  const Act* x;
  const uint32_t* row_of;
  uint64_t K;
  const Act* row(uint32_t t) const { return x + (row_of ? row_of[t] : t) * K; }
};

// acc[i][r][0..64) = row t0+r of x times the outputs of column i; r < rows <= kPassRows, at most kColumns columns, of one K.
template <class Act>
static void tile_product(const Column* columns, uint32_t count, const RowSource<Act>& x, uint32_t t0, uint32_t rows, float* acc) {
  alignas(64) float panel[kPassRows * kTileK], wt[kTileK * kTileN];
  Words words[kColumns][4];
  std::memset(wt, 0, sizeof(wt));
  for (uint32_t i = 0; i < count; i++) std::memset(acc + i * kAccFloats, 0, uint64_t(rows) * kTileN * sizeof(float));
  const uint32_t K = columns[0].w->K;
  for (uint32_t k = 0; k < K; k += kTileK) {
    const uint32_t kn = smaller(kTileK, K - k);
    for (uint32_t r = 0; r < rows; r++) {
      const Act* row = x.row(t0 + r) + k;
      __builtin_prefetch(row + kTileK, 0, 2);
      __builtin_prefetch(row + kTileK + 32, 0, 2);
      for (uint32_t j = 0; j < kn; j += 16) store(panel + r * kTileK + j, load(row + j));
      if (kn % 32) store(panel + r * kTileK + kn, zero());  // K is a multiple of 16: the last block may be half a one
    }
    for (uint32_t i = 0; i < count; i++) {
      dequantise<Act>(columns[i], k, kn, words[i], wt);
      multiply_tile<Act>(columns[i].n, rows, acc + i * kAccFloats, panel, wt, round_up(kn, 32));
    }
  }
}

}  // namespace lily::cpu::LILY_CPU_NS
