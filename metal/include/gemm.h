// A tile of rows x W^T: packed weights are staged by whole lines, 4-bit codes and all, unpacked to the activation storage 32 products at a time
// into threadgroup memory, and multiplied at once; the expanded matrix exists nowhere else. Sums are fp32.
// Order of the sums of an output: products in ascending steps of 8 through simdgroup_matrix, one accumulator from zero. It depends on neither
// the tile's rows nor its place, so tiles of 16 and of 32 rows give equal bits.
// Threadgroup memory: two tiles of x and W (one of each when activations are float32), and the raw codes, which later hold the sums.
#ifndef LILY_GEMM_H
#define LILY_GEMM_H
#include <metal_simdgroup_matrix>
#include "quant.h"

constant uint GEMM_WIDE [[function_constant(3)]];  // 1: rows of codes start at multiples of 16 bytes

#define GEMM_THREADS 128u
#define GEMM_OUTPUTS 64u  // of a tile; a pair of weights takes 32 each
#define GEMM_STEP 32u     // products between two barriers
#define GEMM_LD 40u       // row of a staged tile, in activations: 32 and a pad that spreads rows over banks
#ifdef LILY_STORAGE_FLOAT32
#define GEMM_BUFFERS 1u
#else
#define GEMM_BUFFERS 2u
#endif

// One tile's work: rows of x (through a list of slots, or in order), outputs [n0, n0 + 64) of `a`, or [n0, n0 + 32) of `a` and of `b`.
struct GemmTile {
  Weight a, b;
  ulong a_row, b_row;  // where the expert's rows start
  uint N, n0;
  uint rows;              // live rows of this tile
  device const act* x;    // row 0 of the tile, unless slots gives rows of the whole x
  device const uint* slots;
  bool by_slot_list;
};

inline uint stored_bits(uint format) { return format == 17u ? 16u : format; }

// Values of a row that are staged together: 128 bytes of 4-bit codes or of plain values.
inline uint chunk_of(uint format) { return format <= 8u ? 256u : format == 32u ? 32u : 64u; }

// Sixteen codes from BITS half words.
template <uint BITS> inline void unpack_codes(threadgroup const ushort* p, float scale, float bias, threadgroup act_pack* out) {
  uint words[BITS + 1u];
  LILY_UNROLL for (uint i = 0; i < BITS; i++) words[i] = p[i];
  words[BITS] = 0u;
  LILY_UNROLL for (uint i = 0; i < 16u; i += 4u) {
    float v[4];
    LILY_UNROLL for (uint j = 0; j < 4u; j++) {
      const uint bit = BITS * (i + j), word = bit / 16u, shift = bit % 16u;
      uint q = words[word] >> shift;
      if (shift + BITS > 16u) q |= words[word + 1u] << (16u - shift);
      v[j] = metal::fma(scale, float(q & ((1u << BITS) - 1u)), bias);
    }
    out[i / 4u] = pack_act(float4(v[0], v[1], v[2], v[3]));
  }
}

template <uint FORMAT> inline void unpack_plain(threadgroup const uint* p, threadgroup act_pack* out) {
  LILY_UNROLL for (uint i = 0; i < 16u; i += 4u) {
    float v[4];
    LILY_UNROLL for (uint j = 0; j < 4u; j++) {
      if (FORMAT == 32u) {
        v[j] = as_type<float>(p[i + j]);
      } else {
        const uint word = p[(i + j) / 2u], half_word = (j & 1u) != 0u ? word >> 16 : word & 0xffffu;
        v[j] = FORMAT == 16u ? bf16_value(half_word) : f16_value(half_word);
      }
    }
    out[i / 4u] = pack_act(float4(v[0], v[1], v[2], v[3]));
  }
}

// Sixteen weights of one output, from its staged row; `at`: the first of them in the chunk, `k`: in the row.
inline void unpack_weights(uint format, thread const Weight& w, ulong row, uint k, threadgroup const uint* raw, uint at, threadgroup act_pack* out) {
  if (format > 8u) {
    threadgroup const uint* p = raw + at * stored_bits(format) / 32u;
    if (format == 16u) unpack_plain<16>(p, out);
    if (format == 17u) unpack_plain<17>(p, out);
    if (format == 32u) unpack_plain<32>(p, out);
  } else {
    threadgroup const ushort* p = (threadgroup const ushort*)raw + at * format / 16u;
    const uint shift = group_shift(w.group);
    const ulong g = row * (w.K >> shift) + (k >> shift);
    const float scale = bf16_value(w.scales[g]), bias = bf16_value(w.biases[g]);
    if (format == 4u) unpack_codes<4>(p, scale, bias, out);
    if (format == 8u) unpack_codes<8>(p, scale, bias, out);
    if (format == 6u) unpack_codes<6>(p, scale, bias, out);
    if (format == 5u) unpack_codes<5>(p, scale, bias, out);
    if (format == 3u) unpack_codes<3>(p, scale, bias, out);
    if (format == 2u) unpack_codes<2>(p, scale, bias, out);
  }
}

// The sums of the tile, [BM][64] floats in raw. PAIR: outputs 0..31 are of `a`, 32..63 of `b`. RAW: words of the raw tile.
template <uint BM, uint RAW, bool PAIR>
inline void gemm_tile(thread const GemmTile& t, threadgroup act* xs, threadgroup act* ws, threadgroup uint* raw, uint tid, uint sg) {
  const uint K = t.a.K, chunk = PAIR ? metal::min(chunk_of(W_FORMAT), chunk_of(W2_FORMAT)) : chunk_of(W_FORMAT);
  const uint a_words = chunk * stored_bits(W_FORMAT) / 32u, b_words = PAIR ? chunk * stored_bits(W2_FORMAT) / 32u : a_words;
  const uint stride = metal::max(a_words, b_words);  // words of a staged row

  // what this thread stages of x: eight values of one row
  const uint x_row = tid / 4u, x_at = tid % 4u * 8u;
  const bool x_live = x_row < t.rows;
  const ulong x_from = t.by_slot_list && x_live ? ulong(t.slots[x_row]) : ulong(x_row);
  device const act_pack* x = (device const act_pack*)(t.x + (x_live ? x_from * K : 0ul));
  // and of W: sixteen values of one output
  const uint w_row = tid / 2u, w_at = tid % 2u * 16u;
  const bool second = PAIR && w_row >= GEMM_OUTPUTS / 2u;
  const uint w_n = t.n0 + (second ? w_row - GEMM_OUTPUTS / 2u : w_row);
  const bool w_live = w_n < t.N;

  constexpr uint TILES = BM == 32u ? 4u : 2u;  // of 8 outputs, beside two of 8 rows
  const uint m0 = BM == 32u ? sg / 2u * 16u : 0u, c0 = BM == 32u ? sg % 2u * 32u : sg * 16u;
  simdgroup_matrix<float, 8, 8> sums[2][TILES];
  LILY_UNROLL for (uint i = 0; i < 2u; i++) LILY_UNROLL for (uint j = 0; j < TILES; j++) sums[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);

  uint side = 0u;
  for (uint begin = 0; begin < K; begin += chunk) {
    // codes of all outputs, as they lie: neighbouring threads read neighbouring words
    const uint unit = GEMM_WIDE != 0u ? 4u : 1u, units = stride / unit;
    for (uint i = tid; i < GEMM_OUTPUTS * units; i += GEMM_THREADS) {
      const uint row = i / units, word = i % units * unit;
      const bool other = PAIR && row >= GEMM_OUTPUTS / 2u;
      const uint n = t.n0 + (other ? row - GEMM_OUTPUTS / 2u : row), words = other ? b_words : a_words;
      const uint bits = stored_bits(other ? W2_FORMAT : W_FORMAT), row_words = K * bits / 32u, from = begin * bits / 32u + word;
      const bool live = n < t.N && word < words && from < row_words;
      const ulong at = live ? ((other ? t.b_row : t.a_row) + n) * row_words + from : 0ul;
      device const uint* codes = other ? t.b.codes : t.a.codes;
      if (GEMM_WIDE != 0u) {
        uint4 v = uint4(0u, 0u, 0u, 0u);
        if (live) v = *(device const uint4*)(codes + at);
        *(threadgroup uint4*)(raw + row * stride + word) = v;
      } else {
        raw[row * stride + word] = live ? codes[at] : 0u;
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    for (uint at = 0; at < chunk && begin + at < K; at += GEMM_STEP) {
      if (GEMM_BUFFERS == 1u && (begin | at) != 0u) threadgroup_barrier(mem_flags::mem_threadgroup);
      threadgroup act* xt = xs + side * BM * GEMM_LD;
      threadgroup act* wt = ws + side * GEMM_OUTPUTS * GEMM_LD;
      const uint k = begin + at;
      if (x_row < BM) {
        threadgroup act_pack* to = (threadgroup act_pack*)(xt + x_row * GEMM_LD + x_at);
        const bool inside = x_live && k + x_at < K;
        to[0] = inside ? x[(k + x_at) / 4u] : pack_act(float4(0.0f, 0.0f, 0.0f, 0.0f));
        to[1] = inside ? x[(k + x_at) / 4u + 1u] : pack_act(float4(0.0f, 0.0f, 0.0f, 0.0f));
      }
      threadgroup act_pack* to = (threadgroup act_pack*)(wt + w_row * GEMM_LD + w_at);
      if (w_live && k + w_at < K) {
        if (second)
          unpack_weights(W2_FORMAT, t.b, t.b_row + w_n, k + w_at, raw + w_row * stride, at + w_at, to);
        else
          unpack_weights(W_FORMAT, t.a, t.a_row + w_n, k + w_at, raw + w_row * stride, at + w_at, to);
      } else {
        LILY_UNROLL for (uint i = 0; i < 4u; i++) to[i] = pack_act(float4(0.0f, 0.0f, 0.0f, 0.0f));
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);

      LILY_UNROLL for (uint kk = 0; kk < GEMM_STEP; kk += 8u) {
        simdgroup_matrix<act, 8, 8> a[2], b;
        LILY_UNROLL for (uint i = 0; i < 2u; i++) simdgroup_load(a[i], xt + (m0 + 8u * i) * GEMM_LD + kk, GEMM_LD);
        LILY_UNROLL for (uint j = 0; j < TILES; j++) {
          simdgroup_load(b, wt + (c0 + 8u * j) * GEMM_LD + kk, GEMM_LD, ulong2(0, 0), true);
          LILY_UNROLL for (uint i = 0; i < 2u; i++) simdgroup_multiply_accumulate(sums[i][j], a[i], b, sums[i][j]);
        }
      }
      side = (side + 1u) % GEMM_BUFFERS;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  threadgroup float* out = (threadgroup float*)raw;
  LILY_UNROLL for (uint i = 0; i < 2u; i++)
    LILY_UNROLL for (uint j = 0; j < TILES; j++) simdgroup_store(sums[i][j], out + (m0 + 8u * i) * GEMM_OUTPUTS + c0 + 8u * j, GEMM_OUTPUTS);
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

#endif
