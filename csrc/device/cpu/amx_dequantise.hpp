// Weights for tile products: 32 outputs of a matrix as bf16 tiles [k/32][2][16 outputs][32 of k], 64 of k at a time and a few rows at
// a time, so that the work fits between tile instructions. Values are those of gemm_tile.hpp: bf16(scale * q + bias).
#pragma once
#include "device/cpu/amx_panel.hpp"

namespace lily::cpu::LILY_CPU_NS {

constexpr uint32_t kPairK = 64;  // depth that is dequantised at once: a group, two tiles

// Consecutive rows of a weight. Rows past the last one that exists repeat it.
struct Block {
  const Weight* w;
  uint64_t first;
  uint32_t last, rows;  // last: relative to the first; rows: 16 or 32, 0 for no block
  uint64_t row(uint32_t i) const { return first + smaller(i, last); }
};

// Lane 2q and 2q + 1 of 32: bf16(scale * q + bias).
LILY_INLINE __m512i doubled_table(V value) {
  const __m512i b = bits(value).v;
  const __mmask16 odd = _mm512_test_epi32_mask(b, _mm512_set1_epi32(0x10000));
  const __m512i up = _mm512_mask_add_epi32(_mm512_add_epi32(b, _mm512_set1_epi32(0x7fff)), odd, b, _mm512_set1_epi32(0x8000));
  return _mm512_ternarylogic_epi32(_mm512_set1_epi32(int(0xffff0000u)), up, _mm512_srli_epi32(up, 16), 0xca);
}

// Whether scale * q + bias is zero or a normal number for each of 16 scales and biases: zero, or from 2^-118 to below 2^119. A sum of such
// products has no bit below 2^-126, so rounding it with an instruction that counts subnormals as zero changes nothing.
LILY_INLINE bool plain_values(V v) {
  const __m512i e = _mm512_and_si512(bits(v).v, _mm512_set1_epi32(0x7f800000));
  const __mmask16 zero = _mm512_testn_epi32_mask(bits(v).v, _mm512_set1_epi32(0x7fffffff));
  const __mmask16 inside = _mm512_cmple_epu32_mask(_mm512_sub_epi32(e, _mm512_set1_epi32(9 << 23)), _mm512_set1_epi32(236 << 23));
  return __mmask16(zero | inside) == 0xffff;
}

class Fill {
 public:
  // `a` has room for 32 x K values, `groups` for 64 x round_up(groups of a row, 16) floats.
  Fill(uint32_t* a, float* groups) : a_(a), groups_(groups) {}

  // The next rows to dequantise. The last ones must be done: their scales go.
  void start(const Block& block) {
    block_ = block;
    fast_ = block.rows && block.w->fast(4);
    if (!block.rows) return;
    const Weight& w = *block.w;
    if (!fast_ && w.fmt.kind == LILY_W_AFFINE) reader_ = CodeReader(w.fmt.bits);
    if (!fast_) return;
    stride_ = round_up(w.groups, 16);
    plain_ = true;
    for (uint32_t i = 0; i < block.rows; i++) {
      codes_[i] = w.row(block.row(i));
      read_groups(w.row_scales(block.row(i)), groups_ + i * stride_);
      read_groups(w.row_biases(block.row(i)), groups_ + (kBlockN + i) * stride_);
    }
  }

  // Rows [from, to) of 64 of k. Meanwhile the same rows of the next block are fetched.
  __attribute__((always_inline)) void part(uint32_t pair, uint32_t from, uint32_t to) {
    if (fast_)
      for (uint32_t i = from; i < to; i++) row4(pair, i);
    else
      any(pair, from, to);
  }
  void all(uint32_t pair) { part(pair, 0, block_.rows); }

  uint32_t begun = 0;  // pairs of the block that are done already

 private:
  __attribute__((always_inline)) void read_groups(const uint8_t* p, float* out) {
    const uint32_t groups = block_.w->groups;
    __builtin_prefetch(p + kBlockN * 2 * groups, 0, 2);
    for (uint32_t g = 0; g < groups; g += 16, p += 32) {
      const __mmask16 mask = groups - g >= 16 ? __mmask16(0xffff) : __mmask16((1u << (groups - g)) - 1);
      const V v = from_bits(shl<16>(U{_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, p))}));
      plain_ &= plain_values(v);
      store(out + g, v);
    }
  }

  // A group of 64 codes of 4 bits has 16 possible values: rounded once, then looked up, 32 codes with one instruction.
  __attribute__((always_inline)) void row4(uint32_t pair, uint32_t i) {
    // word j of a 128-bit part takes byte j/2 of its four twice; a shift brings the code to the bits that choose a word of the table
    const __m512i doubled = _mm512_set_epi64(0x0f0f0f0f0e0e0e0ell, 0x0d0d0d0d0c0c0c0cll, 0x0b0b0b0b0a0a0a0all, 0x0909090908080808ll, 0x0707070706060606ll, 0x0505050504040404ll,
                                             0x0303030302020202ll, 0x0101010100000000ll);
    const uint8_t* codes = codes_[i] + 32 * pair;
    if (pair % 2 == 0) __builtin_prefetch(codes + kBlockN * block_.w->row_bytes, 0, 2);
    const V value = fma(splat(groups_[i * stride_ + pair]), digits(), splat(groups_[(kBlockN + i) * stride_ + pair]));
    __m512i table, shift;
#if defined(__AVX512BF16__)
    if (__builtin_expect(plain_, true)) {  // lanes q and q + 16; the fifth bit of an index is any
      table = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(value.v, value.v));
      shift = _mm512_set1_epi32(0x00040008);
    } else
#endif
    {
      table = doubled_table(value);
      shift = _mm512_set1_epi32(0x00030007);
    }
    uint32_t* out = tile_row(2 * pair, i);
    LILY_UNROLL for (uint32_t h = 0; h < 2; h++) {
      const __m512i c = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + 16 * h))), doubled);
      _mm512_store_si512(out + h * 2 * kTileWords, _mm512_permutexvar_epi16(_mm512_srlv_epi16(c, shift), table));
    }
  }

  // Any format, 16 values at a time; a K that is no multiple of 32 ends in zeros.
  __attribute__((noinline)) void any(uint32_t pair, uint32_t from, uint32_t to) {
    const Weight& w = *block_.w;
    const uint32_t end = smaller(kPairK * (pair + 1), w.K);
    for (uint32_t i = from; i < to; i++) {
      const uint64_t r = block_.row(i);
      uint32_t j = kPairK * pair;
      for (; j < end; j += 16) {
        V v;
        if (w.fmt.kind == LILY_W_AFFINE) {
          const uint32_t at = j / w.fmt.group * 2;
          const V q = w.fmt.bits == 8 ? to_float(load_u8(w.row(r) + j)) : reader_.read(w.row(r), w.row_bytes, j);
          v = fma(splat(bf16_at(w.row_scales(r) + at)), q, splat(bf16_at(w.row_biases(r) + at)));
        } else if (w.fmt.kind == LILY_W_F32) {
          v = from_bits(loadu(w.row(r) + uint64_t(j) * 4));
        } else {
          v = w.fmt.kind == LILY_W_BF16 ? load_bf16(w.row(r) + uint64_t(j) * 2) : load_f16(w.row(r) + uint64_t(j) * 2);
        }
        store(reinterpret_cast<Bf16*>(tile_row(j / 32, i)) + j % 32, v);
      }
      if (j % 32) store(reinterpret_cast<Bf16*>(tile_row(j / 32, i)) + 16, zero());
    }
  }

  uint32_t* tile_row(uint32_t k, uint32_t i) const { return a_ + (uint64_t(k) * 2 + i / 16) * kTileWords + i % 16 * 16; }

  uint32_t* const a_;
  float* const groups_;  // [2][32][stride]: scales, biases
  Block block_{};
  CodeReader reader_{8};
  const uint8_t* codes_[kBlockN];
  uint32_t stride_ = 0;
  bool fast_ = false, plain_ = true;
};

}  // namespace lily::cpu::LILY_CPU_NS
