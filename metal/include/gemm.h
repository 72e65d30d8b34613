// A tile of rows x W^T: packed weights are staged by whole lines, 4-bit codes and all, unpacked to the activation storage 32 products at a time
// into threadgroup memory, and multiplied at once; the expanded matrix exists nowhere else. Sums are fp32.
// Here is the staging; gemm_simdgroup.h and gemm_tensor.h multiply what is staged, each in a function gemm_tile.
// An output's sum depends on neither the tile's rows nor its place, so tiles of 16 and of 32 rows give equal bits.
// Threadgroup memory: two tiles of x and W (one of each when activations are float32), and the raw codes, which later hold the sums.
#ifndef LILY_GEMM_H
#define LILY_GEMM_H
#include "quant.h"

constant uint GEMM_WIDE [[function_constant(3)]];  // 1: rows of codes start at multiples of 16 bytes

#define GEMM_THREADS 128u
#define GEMM_OUTPUTS 64u  // of a tile; a pair of weights takes 32 each
#define GEMM_STEP 32u     // products between two barriers
#define GEMM_RAW 2048u    // words of staged codes, later the tile's sums
#define GEMM_GROUPS 8u    // groups of a staged row at most; their scales and biases lie behind the codes
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

// Values of a row that are staged together: a line of 128 bytes where the bits divide it, else less (3, 5 and 6 bits), and GEMM_GROUPS groups at most.
inline uint chunk_of(uint format, uint group) {
  if (format == 2u && group >= 64u) return 512u;
  return format <= 4u ? 256u : format <= 8u ? 128u : format == 32u ? 32u : 64u;
}

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

// Sixteen weights of one output, from its staged row; `at`: the first of them in the chunk. `pair`: scale and bias of their group.
inline void unpack_weights(uint format, uint pair, threadgroup const uint* raw, uint at, threadgroup act_pack* out) {
  if (format > 8u) {
    threadgroup const uint* p = raw + at * stored_bits(format) / 32u;
    if (format == 16u) unpack_plain<16>(p, out);
    if (format == 17u) unpack_plain<17>(p, out);
    if (format == 32u) unpack_plain<32>(p, out);
  } else {
    threadgroup const ushort* p = (threadgroup const ushort*)raw + at * format / 16u;
    const float scale = bf16_value(pair & 0xffffu), bias = bf16_value(pair >> 16);
    if (format == 4u) unpack_codes<4>(p, scale, bias, out);
    if (format == 8u) unpack_codes<8>(p, scale, bias, out);
    if (format == 6u) unpack_codes<6>(p, scale, bias, out);
    if (format == 5u) unpack_codes<5>(p, scale, bias, out);
    if (format == 3u) unpack_codes<3>(p, scale, bias, out);
    if (format == 2u) unpack_codes<2>(p, scale, bias, out);
  }
}

// Words of a staged row of codes: of each weight, and from one row to the next.
struct CodeRows {
  uint chunk, a_words, b_words, stride;
};
template <bool PAIR> inline CodeRows code_rows(thread const GemmTile& t) {
  CodeRows c;
  c.chunk = chunk_of(W_FORMAT, t.a.group);
  if (PAIR) c.chunk = metal::min(c.chunk, chunk_of(W2_FORMAT, t.b.group));
  c.a_words = c.chunk * stored_bits(W_FORMAT) / 32u;
  c.b_words = PAIR ? c.chunk * stored_bits(W2_FORMAT) / 32u : c.a_words;
  c.stride = metal::max(c.a_words, c.b_words);
  return c;
}

// The codes of all outputs for values begin .. begin + chunk, as they lie: neighbouring threads read neighbouring words; and the scales and
// biases of their groups, each read once. PAIR: outputs 0..31 are of `a`, 32..63 of `b`.
template <bool PAIR> inline void stage_codes(thread const GemmTile& t, CodeRows c, uint begin, threadgroup uint* raw, uint tid) {
  const uint unit = GEMM_WIDE != 0u ? 4u : 1u, units = c.stride / unit;
  for (uint i = tid; i < GEMM_OUTPUTS * units; i += GEMM_THREADS) {
    const uint row = i / units, word = i % units * unit;
    const bool other = PAIR && row >= GEMM_OUTPUTS / 2u;
    const uint n = t.n0 + (other ? row - GEMM_OUTPUTS / 2u : row), words = other ? c.b_words : c.a_words;
    const uint bits = stored_bits(other ? W2_FORMAT : W_FORMAT), row_words = t.a.K * bits / 32u, from = begin * bits / 32u + word;
    const bool live = n < t.N && word < words && from < row_words;
    const ulong at = live ? ((other ? t.b_row : t.a_row) + n) * row_words + from : 0ul;
    device const uint* codes = other ? t.b.codes : t.a.codes;
    if (GEMM_WIDE != 0u) {
      uint4 v = uint4(0u, 0u, 0u, 0u);
      if (live) v = *(device const uint4*)(codes + at);
      *(threadgroup uint4*)(raw + row * c.stride + word) = v;
    } else {
      raw[row * c.stride + word] = live ? codes[at] : 0u;
    }
  }
  for (uint i = tid; i < GEMM_OUTPUTS * GEMM_GROUPS; i += GEMM_THREADS) {
    const uint row = i / GEMM_GROUPS;
    const bool other = PAIR && row >= GEMM_OUTPUTS / 2u;
    if ((other ? W2_FORMAT : W_FORMAT) <= 8u) {
      const uint n = t.n0 + (other ? row - GEMM_OUTPUTS / 2u : row), shift = group_shift(other ? t.b.group : t.a.group), groups = t.a.K >> shift;
      const uint g = (begin >> shift) + i % GEMM_GROUPS, last = metal::min(begin + c.chunk, t.a.K) - 1u;
      uint pair = 0u;
      if (n < t.N && g <= last >> shift) {
        const ulong at = ((other ? t.b_row : t.a_row) + n) * groups + g;
        pair = uint((other ? t.b.scales : t.a.scales)[at]) | uint((other ? t.b.biases : t.a.biases)[at]) << 16;
      }
      raw[GEMM_RAW + i] = pair;
    }
  }
}

// What a thread stages in a step: eight values of one row of x, sixteen values of one output.
struct GemmPlace {
  device const act_pack* x;
  uint x_row, x_at, w_row, w_at, w_n;
  bool x_live, w_live, second;
};
template <bool PAIR> inline GemmPlace gemm_place(thread const GemmTile& t, uint tid) {
  GemmPlace p;
  p.x_row = tid / 4u;
  p.x_at = tid % 4u * 8u;
  p.x_live = p.x_row < t.rows;
  const ulong from = t.by_slot_list && p.x_live ? ulong(t.slots[p.x_row]) : ulong(p.x_row);
  p.x = (device const act_pack*)(t.x + (p.x_live ? from * t.a.K : 0ul));
  p.w_row = tid / 2u;
  p.w_at = tid % 2u * 16u;
  p.second = PAIR && p.w_row >= GEMM_OUTPUTS / 2u;
  p.w_n = t.n0 + (p.second ? p.w_row - GEMM_OUTPUTS / 2u : p.w_row);
  p.w_live = p.w_n < t.N;
  return p;
}

// One step: x into xt, unpacked weights into wt, both with rows of GEMM_LD; `at` values into the staged chunk, which starts at value `begin`.
template <uint BM> inline void stage_step(thread const GemmTile& t, GemmPlace p, CodeRows c, uint begin, uint at, threadgroup act* xt, threadgroup act* wt, threadgroup const uint* raw) {
  const uint k = begin + at, K = t.a.K;
  const act_pack none = pack_act(float4(0.0f, 0.0f, 0.0f, 0.0f));
  if (p.x_row < BM) {
    threadgroup act_pack* to = (threadgroup act_pack*)(xt + p.x_row * GEMM_LD + p.x_at);
    const bool inside = p.x_live && k + p.x_at < K;
    to[0] = inside ? p.x[(k + p.x_at) / 4u] : none;
    to[1] = inside ? p.x[(k + p.x_at) / 4u + 1u] : none;
  }
  threadgroup act_pack* to = (threadgroup act_pack*)(wt + p.w_row * GEMM_LD + p.w_at);
  if (p.w_live && k + p.w_at < K) {
    const uint format = p.second ? W2_FORMAT : W_FORMAT;
    uint pair = 0u;
    if (format <= 8u) {
      const uint shift = group_shift(p.second ? t.b.group : t.a.group);
      pair = raw[GEMM_RAW + p.w_row * GEMM_GROUPS + ((k + p.w_at) >> shift) - (begin >> shift)];
    }
    unpack_weights(format, pair, raw + p.w_row * c.stride, at + p.w_at, to);
  } else {
    LILY_UNROLL for (uint i = 0; i < 4u; i++) to[i] = none;
  }
}

#endif
