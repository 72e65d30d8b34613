// The matrix product of prefill on tiles, with the sums of gemm_tile.hpp: y[t][n] for up to 64 outputs and a panel of rows.
// A = weights, 32 outputs x 256 of K dequantised to bf16 where they lie (first-level cache, no transposition: a look-up of 16 values
// per group); B = rows, packed once for all outputs of a range as pairs of k (second-level cache); C = two by two tiles of sums, in
// memory between the steps of K.
#pragma once
#include "device/cpu/amx_tiles.hpp"
#include "device/cpu/gemm_tile.hpp"

namespace lily::cpu::LILY_CPU_NS {

constexpr uint32_t kStepK = 256;                // depth that is dequantised at once
constexpr uint32_t kBlockN = 32, kBlockT = 32;  // outputs and rows of the tiles that are summed at once
constexpr uint32_t kPanelValues = 512 * 1024;   // bf16 values of packed rows: 1 MiB

// Rows that one panel holds.
LILY_INLINE uint32_t panel_rows(uint32_t K) { return smaller(kPassRows, kPanelValues / K / kBlockT * kBlockT); }

// Packed rows: tiles [rows/32][K/32][2][16 pairs of k][16 rows]; rows past the last one are zeros.
struct Panel {
  alignas(64) uint32_t word[kPanelValues / 2];
  uint32_t rows, depth;  // depth in tiles

  uint32_t blocks() const { return (rows + kBlockT - 1) / kBlockT; }
  bool single(uint32_t block) const { return rows - block * kBlockT <= kTileRows; }
  const uint32_t* tile(uint32_t block, uint32_t k) const { return word + (uint64_t(block) * depth + k) * 2 * kTileWords; }

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

// Lane q holds bf16(scale * q + bias) in both halves.
LILY_INLINE __m512i code_table(float scale, float bias) {
  const __m512i b = bits(fma(splat(scale), digits(), splat(bias))).v;
  const __mmask16 odd = _mm512_test_epi32_mask(b, _mm512_set1_epi32(0x10000));
  const __m512i up = _mm512_mask_add_epi32(_mm512_add_epi32(b, _mm512_set1_epi32(0x7fff)), odd, b, _mm512_set1_epi32(0x8000));
  return _mm512_ternarylogic_epi32(_mm512_set1_epi32(int(0xffff0000u)), up, _mm512_srli_epi32(up, 16), 0xca);
}

// Scales or biases of some groups as floats, sixteen at a time.
LILY_INLINE void group_values(const uint8_t* p, uint32_t groups, float* out) {
  for (uint32_t g = 0; g < groups; g += 16, p += 32) {
    const __mmask16 mask = groups - g >= 16 ? __mmask16(0xffff) : __mmask16((1u << (groups - g)) - 1);
    store(out + g, from_bits(shl<16>(U{_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, p))})));
  }
}

// Where row i of a block of outputs goes: tiles [k/32][2][16 outputs][32 of k].
LILY_INLINE uint32_t* tile_row(uint32_t* a, uint32_t k, uint32_t i) { return a + (k / 32 * 2 + i / 16) * kTileWords + i % 16 * 16; }

// Some rows of a weight and a range of their columns. Rows past the last one that exists repeat it.
struct Patch {
  const Weight* w;
  uint64_t first;
  uint32_t last, rows, k, columns;  // last: relative to the first
  uint64_t row(uint32_t i) const { return first + smaller(i, last); }
};

constexpr uint32_t kFillRows = 4;  // rows of a patch that are dequantised at once, at most

// Rows [from, to) with codes of 4 bits in groups of 64. Meanwhile the same rows of the next block are fetched.
LILY_INLINE void dequantise4(const Patch& p, uint32_t from, uint32_t to, uint32_t* a) {
  // word j of a 128-bit part takes byte j/2 of its four twice; the code is then moved to bits 1..4 of the word, which choose a word of the table
  const __m512i doubled = _mm512_set_epi64(0x0f0f0f0f0e0e0e0ell, 0x0d0d0d0d0c0c0c0cll, 0x0b0b0b0b0a0a0a0all, 0x0909090908080808ll, 0x0707070706060606ll,
                                           0x0505050504040404ll, 0x0303030302020202ll, 0x0101010100000000ll);
  const __m512i shift = _mm512_set1_epi32(0x00030007);
  const Weight& w = *p.w;
  const uint32_t groups = p.columns / 64;
  // first all scales and biases, which the rows below then read without waiting
  alignas(64) float scale[kFillRows][round_up(kStepK / 64, 16)], bias[kFillRows][round_up(kStepK / 64, 16)];
  for (uint32_t i = from; i < to; i++) {
    const uint8_t *scales = w.row_scales(p.row(i)) + p.k / 32, *biases = w.row_biases(p.row(i)) + p.k / 32;
    group_values(scales, groups, scale[i - from]);
    group_values(biases, groups, bias[i - from]);
    __builtin_prefetch(scales + kBlockN * 2 * w.groups, 0, 2);
    __builtin_prefetch(biases + kBlockN * 2 * w.groups, 0, 2);
  }
  __asm__ volatile("" ::: "memory");  // they are broadcast from memory: a load each instead of shuffles
  for (uint32_t i = from; i < to; i++) {
    const uint8_t *codes = w.row(p.row(i)) + p.k / 2, *ahead = codes + kBlockN * w.row_bytes;
    const float *s = scale[i - from], *b = bias[i - from];
    uint32_t* out = tile_row(a, 0, i);
    auto group = [&](uint32_t g) __attribute__((always_inline)) {
      const __m512i table = code_table(s[g], b[g]);
      LILY_UNROLL for (uint32_t h = 0; h < 2; h++) {
        const __m512i c = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + 32 * g + 16 * h))), doubled);
        _mm512_store_si512(out + (2 * g + h) * 2 * kTileWords, _mm512_permutexvar_epi16(_mm512_srlv_epi16(c, shift), table));
      }
    };
    uint32_t g = 0;
    for (; g + 4 <= groups; g += 4, codes += 128, ahead += 128, s += 4, b += 4, out += 16 * kTileWords) {
      __builtin_prefetch(ahead, 0, 2);
      __builtin_prefetch(ahead + 64, 0, 2);
      LILY_UNROLL for (uint32_t j = 0; j < 4; j++) group(j);
    }
    for (uint32_t j = 0; g + j < groups; j++) group(j);
  }
}

// Rows [from, to) of any format, 16 values at a time.
static void dequantise_any(const Patch& p, uint32_t from, uint32_t to, uint32_t* a) {
  const Weight& w = *p.w;
  const CodeReader reader(w.fmt.kind == LILY_W_AFFINE ? w.fmt.bits : 8);
  for (uint32_t i = from; i < to; i++) {
    const uint64_t r = p.row(i);
    for (uint32_t k = 0; k < p.columns; k += 16) {
      const uint32_t j = p.k + k;
      V v;
      if (w.fmt.kind == LILY_W_AFFINE) {
        const uint32_t at = j / w.fmt.group * 2;
        const V q = w.fmt.bits == 8 ? to_float(load_u8(w.row(r) + j)) : reader.read(w.row(r), w.row_bytes, j);
        v = fma(splat(bf16_at(w.row_scales(r) + at)), q, splat(bf16_at(w.row_biases(r) + at)));
      } else if (w.fmt.kind == LILY_W_F32) {
        v = from_bits(loadu(w.row(r) + uint64_t(j) * 4));
      } else {
        v = w.fmt.kind == LILY_W_BF16 ? load_bf16(w.row(r) + uint64_t(j) * 2) : load_f16(w.row(r) + uint64_t(j) * 2);
      }
      store(reinterpret_cast<Bf16*>(tile_row(a, k, i)) + k % 32, v);
    }
    if (p.columns % 32) store(reinterpret_cast<Bf16*>(tile_row(a, p.columns, i)) + 16, zero());
  }
}

// Dequantises a patch a few rows at a time, between the tile products of the patch before it: vector and tile units work side by side.
class Fill {
 public:
  Fill(const Patch& patch, uint32_t* a) : patch_(patch), a_(a) {}
  __attribute__((noinline)) void some(uint32_t rows) {
    if (done_ >= patch_.rows) return;
    const uint32_t to = smaller(done_ + rows, patch_.rows);
    if (patch_.w->fast(4))
      dequantise4(patch_, done_, to, a_);
    else
      dequantise_any(patch_, done_, to, a_);
    done_ = to;
  }
  void all() {
    while (done_ < patch_.rows) some(kFillRows);
  }

 private:
  const Patch patch_;
  uint32_t* const a_;
  uint32_t done_ = 0;
};

// Tiles 0-3: sums of output tile n and row tile t in 2n + t; 4 and 5: weights; 6 and 7: rows.
template <uint32_t N, uint32_t T> LILY_INLINE void zero_sums() {
  tile_zero<0>();
  if constexpr (T > 1) tile_zero<1>();
  if constexpr (N > 1) tile_zero<2>();
  if constexpr (N > 1 && T > 1) tile_zero<3>();
}
template <uint32_t N, uint32_t T> LILY_INLINE void load_sums(const float* c) {
  tile_load<0>(c);
  if constexpr (T > 1) tile_load<1>(c + kTileWords);
  if constexpr (N > 1) tile_load<2>(c + 2 * kTileWords);
  if constexpr (N > 1 && T > 1) tile_load<3>(c + 3 * kTileWords);
}
template <uint32_t N, uint32_t T> LILY_INLINE void store_sums(float* c) {
  tile_store<0>(c);
  if constexpr (T > 1) tile_store<1>(c + kTileWords);
  if constexpr (N > 1) tile_store<2>(c + 2 * kTileWords);
  if constexpr (N > 1 && T > 1) tile_store<3>(c + 3 * kTileWords);
}

struct TileStep {
  const uint32_t *a, *b;  // tiles in steps of two
  uint32_t depth;         // tiles of k
  bool first, last, kept;  // kept: the registers hold the sums from one step of K to the next
  uint32_t fill;          // rows of the next patch for each tile of k
};

template <uint32_t N, uint32_t T> static void multiply_tiles(const TileStep& s, float* c, Fill& next) {
  if (s.first)
    zero_sums<N, T>();
  else if (!s.kept)
    load_sums<N, T>(c);
  const uint32_t *a = s.a, *b = s.b;
  for (uint32_t k = 0; k < s.depth; k++, a += 2 * kTileWords, b += 2 * kTileWords) {
    tile_load<4>(a);
    tile_load<6>(b);
    tile_multiply<0, 4, 6>();
    if constexpr (T > 1) {
      tile_load<7>(b + kTileWords);
      tile_multiply<1, 4, 7>();
    }
    if constexpr (N > 1) {
      tile_load<5>(a + kTileWords);
      tile_multiply<2, 5, 6>();
    }
    if constexpr (N > 1 && T > 1) tile_multiply<3, 5, 7>();
    next.some(s.fill);
  }
  if (s.last || !s.kept) store_sums<N, T>(c);
}

// A tile of sums [16 outputs][16 rows] into acc[row][64].
LILY_INLINE void spread_sums(const float* c, float* acc) {
  U v[16];
  for (uint32_t i = 0; i < 16; i++) v[i] = loadu(c + 16 * i);
  transpose16(v);
  for (uint32_t i = 0; i < 16; i++) store(acc + i * kTileN, from_bits(v[i]));
}

struct TileScratch {
  alignas(64) uint32_t a[2][kBlockN * kStepK / 2];
  alignas(64) float c[kPassRows / kBlockT * 4 * kTileWords];
};

// One step of K of one block of 32 outputs for all rows of a panel, filling the next patch meanwhile.
static void multiply_patch(const Patch& p, const uint32_t* a, const Panel& x, float* c, Fill& next) {
  const uint32_t blocks = x.blocks(), depth = (p.columns + 31) / 32;
  const bool narrow = p.rows <= kTileRows;
  TileStep step{a, nullptr, depth, p.k == 0, p.k + p.columns == p.w->K, blocks == 1, smaller(kFillRows, (kBlockN + depth * blocks - 1) / (depth * blocks))};
  for (uint32_t b = 0; b < blocks; b++) {
    step.b = x.tile(b, p.k / 32);
    float* sums = c + b * 4 * kTileWords;
    if (narrow)
      x.single(b) ? multiply_tiles<1, 1>(step, sums, next) : multiply_tiles<1, 2>(step, sums, next);
    else
      x.single(b) ? multiply_tiles<2, 1>(step, sums, next) : multiply_tiles<2, 2>(step, sums, next);
  }
  next.all();
}

// The finished sums of a block of outputs into acc[row][64], from output n0 of the tile.
static void spread_patch(const Patch& p, const Panel& x, const float* c, uint32_t n0, float* acc) {
  const bool narrow = p.rows <= kTileRows;
  for (uint32_t b = 0; b < x.blocks(); b++)
    for (uint32_t i = 0; i < 4; i++)
      if ((i < 2 || !narrow) && (i % 2 == 0 || !x.single(b))) spread_sums(c + (b * 4 + i) * kTileWords, acc + (b * kBlockT + i % 2 * 16) * kTileN + n0 + i / 2 * 16);
}

}  // namespace lily::cpu::LILY_CPU_NS
