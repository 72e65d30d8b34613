// Weights where they lie: rows of packed codes with a bf16 scale and bias per group, or plain values; and their dot products in decode.
// A weight's format is a function constant, so that a pipeline holds the code of one format: 2, 3, 4, 5, 6, 8 are affine bits,
// 16 is bf16, 17 f16, 32 f32. Codes lie at multiples of 16 bytes, a row has a multiple of 16 values (of `group` when affine).
//
// A dot product multiplies unrounded weights scale*q + bias, as scale * sum(q x) + bias * sum(x) over the values of a lane's chunk:
// one fma a weight. Codes are not shifted down: x is scaled by the inverse power of two, which changes no bit.
// Order of the sums of a row, however rows are grouped: lane l takes chunks l, l+32, .. of 16 values (32 for 3 and 5 bits, 8 for
// bf16 and f16, 4 for f32); in a chunk the products ascend from zero, acc = fma(scale, q, acc), acc = fma(bias, sum x, acc)
// (plain: acc = fma(w, x, acc)); then lane_sum.
#ifndef LILY_QUANT_H
#define LILY_QUANT_H
#include "reduce.h"

constant uint W_FORMAT [[function_constant(0)]];
constant uint W2_FORMAT [[function_constant(1)]];  // of a dispatch's second weight
constant uint GEMV_READ [[function_constant(2)]];  // 1: read the weights and do no arithmetic, to measure the pure read rate

struct Weight {
  device const uint* codes;
  device const ushort* scales;
  device const ushort* biases;
  uint K, group;
};

template <uint BITS> struct Codes {
  enum { VALUES = BITS == 3 || BITS == 5 ? 32 : 16, WORDS = VALUES * BITS / 32, EXCHANGED = WORDS == 3 || WORDS == 5 };
};

// Code i of a chunk, still shifted by the power of two that code_scale takes back; codes across two words are put together.
template <uint BITS> inline float code_at(thread const uint* words, uint i) {
  uint bit = BITS * i, j = bit >> 5, shift = bit & 31u, mask = (1u << BITS) - 1u;
  if (shift + BITS <= 32u) return float(words[j] & (mask << shift));
  return float((words[j] >> shift | words[j + 1u] << (32u - shift)) & mask);
}
template <uint BITS> inline float code_scale(uint i) {
  uint shift = (BITS * i) & 31u;
  return shift + BITS <= 32u ? as_type<float>((127u - shift) << 23) : 1.0f;
}

// The words of a lane's chunk, of the simdgroup's next `left` words at p. Chunks of 3 and 5 words (3, 5 and 6 bits), which no load takes at
// once, are read as they lie, 32 neighbouring words at a time, and handed over by exchange_words.
template <uint WORDS> inline void load_words(device const uint* p, uint left, uint lane, thread uint* words) {
  if (WORDS == 1u) {
    words[0] = p[lane];
  } else if (WORDS == 2u) {
    uint2 v = *(device const uint2*)(p + 2u * lane);
    words[0] = v.x, words[1] = v.y;
  } else if (WORDS == 4u) {
    uint4 v = *(device const uint4*)(p + 4u * lane);
    words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
  } else {
    LILY_UNROLL for (uint i = 0; i < WORDS; i++) words[i] = 32u * i + lane < left ? p[32u * i + lane] : 0u;
  }
}

// Word w, which lane w % 32 read as its word w / 32, becomes word w % WORDS of lane w / WORDS. WORDS is odd: the words i of all chunks lie in
// 32 different lanes, so each lane gives one and takes one at a time. A collective.
template <uint WORDS> inline void exchange_words(uint lane, thread uint* words) {
  constexpr uint INVERSE = WORDS == 3u ? 11u : 13u;  // of WORDS, modulo 32
  uint held[WORDS];
  LILY_UNROLL for (uint i = 0; i < WORDS; i++) held[i] = words[i];
  LILY_UNROLL for (uint i = 0; i < WORDS; i++) {
    const uint taker = (lane - i) * INVERSE % 32u, at = (WORDS * taker + i) / 32u;
    uint given = held[0];
    LILY_UNROLL for (uint j = 1; j < WORDS; j++) given = at == j ? held[j] : given;
    words[i] = simd_shuffle(given, ushort((WORDS * lane + i) % 32u));
  }
}

inline uint group_shift(uint group) { return 31u - clz(group); }

// Values k.. of x, scaled for their codes; returns their sum. X points to act_pack in device or threadgroup memory.
template <uint BITS, class X> inline float load_scaled(X x, uint k, thread float* v) {
  float sum = 0.0f;
  LILY_UNROLL for (uint i = 0; i < uint(Codes<BITS>::VALUES); i += 4u) {
    float4 a = unpack_act(x[(k + i) / 4u]);
    LILY_UNROLL for (uint j = 0; j < 4u; j++) {
      sum += a[j];
      v[i + j] = a[j] * code_scale<BITS>(i + j);
    }
  }
  return sum;
}

template <uint BITS, class X> inline float dot_affine(thread const Weight& w, X x, ulong first, uint n, uint lane) {
  constexpr uint VALUES = Codes<BITS>::VALUES, WORDS = Codes<BITS>::WORDS;
  const uint shift = group_shift(w.group), row_words = w.K / 32u * BITS, groups = w.K >> shift;
  device const uint* codes[4];
  device const ushort* scales[4];
  device const ushort* biases[4];
  float acc[4];
  LILY_UNROLL for (uint r = 0; r < 4u; r++) {
    ulong row = first + ulong(metal::min(r, n - 1u));  // a row past the end repeats the last one: no branch in the loop
    codes[r] = w.codes + row * row_words;
    scales[r] = w.scales + row * groups;
    biases[r] = w.biases + row * groups;
    acc[r] = 0.0f;
  }
  for (uint base = 0; base < w.K; base += 32u * VALUES) {
    const uint k = base + lane * VALUES;
    const bool live = k < w.K;
    if (Codes<BITS>::EXCHANGED == 0 && !live) break;
    uint words[4][WORDS];
    LILY_UNROLL for (uint r = 0; r < 4u; r++) load_words<WORDS>(codes[r] + base / 32u * BITS, (w.K - base) / 32u * BITS, lane, words[r]);
    const uint g = metal::min(k, w.K - 1u) >> shift;
    float scale[4], bias[4];
    LILY_UNROLL for (uint r = 0; r < 4u; r++) scale[r] = bf16_value(scales[r][g]), bias[r] = bf16_value(biases[r][g]);
    if (GEMV_READ != 0u) {
      LILY_UNROLL for (uint r = 0; r < 4u; r++) {
        uint all = as_type<uint>(acc[r]) ^ as_type<uint>(scale[r]) ^ as_type<uint>(bias[r]);
        LILY_UNROLL for (uint i = 0; i < WORDS; i++) all ^= words[r][i];
        acc[r] = as_type<float>(all & 0x3fffffffu);
      }
      continue;
    }
    if (Codes<BITS>::EXCHANGED != 0) {
      LILY_UNROLL for (uint r = 0; r < 4u; r++) exchange_words<WORDS>(lane, words[r]);
      if (!live) continue;
    }
    float v[VALUES];
    float sum = load_scaled<BITS>(x, k, v);
    LILY_UNROLL for (uint r = 0; r < 4u; r++) {
      float q = 0.0f;
      LILY_UNROLL for (uint i = 0; i < VALUES; i++) q = metal::fma(v[i], code_at<BITS>(words[r], i), q);
      acc[r] = metal::fma(bias[r], sum, metal::fma(scale[r], q, acc[r]));
    }
  }
  return sum_quad(acc[0], acc[1], acc[2], acc[3], lane);
}

inline float f16_value(uint bits) { return float(as_type<half>(ushort(bits))); }

// Sixteen bytes of a plain weight as values: 8 of bf16 or f16, 4 of f32.
template <uint FORMAT> inline float plain_value(uint4 p, uint i) {
  if (FORMAT == 32u) return as_type<float>(p[i & 3u]);
  uint half_word = (i & 1u) != 0u ? p[i / 2u & 3u] >> 16 : p[i / 2u & 3u] & 0xffffu;
  return FORMAT == 16u ? bf16_value(half_word) : f16_value(half_word);
}

template <uint FORMAT, class X> inline float dot_plain(thread const Weight& w, X x, ulong first, uint n, uint lane) {
  constexpr uint VALUES = FORMAT == 32u ? 4u : 8u;
  device const uint* base = w.codes;
  device const uint4* rows[4];
  float acc[4];
  LILY_UNROLL for (uint r = 0; r < 4u; r++) {
    rows[r] = (device const uint4*)base + (first + ulong(metal::min(r, n - 1u))) * (w.K / VALUES);
    acc[r] = 0.0f;
  }
  for (uint k = lane * VALUES; k < w.K; k += 32u * VALUES) {
    uint4 p[4];
    LILY_UNROLL for (uint r = 0; r < 4u; r++) p[r] = rows[r][k / VALUES];
    if (GEMV_READ != 0u) {
      LILY_UNROLL for (uint r = 0; r < 4u; r++) acc[r] = as_type<float>((as_type<uint>(acc[r]) ^ p[r].x ^ p[r].y ^ p[r].z ^ p[r].w) & 0x3fffffffu);
    } else {
      LILY_UNROLL for (uint i = 0; i < VALUES; i += 4u) {
        float4 a = unpack_act(x[(k + i) / 4u]);
        LILY_UNROLL for (uint j = 0; j < 4u; j++) LILY_UNROLL for (uint r = 0; r < 4u; r++)
          acc[r] = metal::fma(plain_value<FORMAT>(p[r], i + j), a[j], acc[r]);
      }
    }
  }
  return sum_quad(acc[0], acc[1], acc[2], acc[3], lane);
}

// Rows first .. first + n - 1 (n from 1 to 4) of w times x, by one simdgroup: lane l gets row first + l % 4. Give W_FORMAT or W2_FORMAT.
template <class X> inline float dot_rows(uint format, thread const Weight& w, X x, ulong first, uint n, uint lane) {
  if (format == 4u) return dot_affine<4>(w, x, first, n, lane);
  if (format == 8u) return dot_affine<8>(w, x, first, n, lane);
  if (format == 16u) return dot_plain<16>(w, x, first, n, lane);
  if (format == 6u) return dot_affine<6>(w, x, first, n, lane);
  if (format == 5u) return dot_affine<5>(w, x, first, n, lane);
  if (format == 3u) return dot_affine<3>(w, x, first, n, lane);
  if (format == 2u) return dot_affine<2>(w, x, first, n, lane);
  if (format == 17u) return dot_plain<17>(w, x, first, n, lane);
  return dot_plain<32>(w, x, first, n, lane);
}

// One value of a weight: for look-ups of single rows, neighbours by neighbouring lanes.
inline float weight_value(uint format, thread const Weight& w, ulong row, uint k) {
  device const uint* base = w.codes;
  if (format == 32u) return as_type<float>(base[row * w.K + k]);
  if (format >= 16u) {
    uint bits = ((device const ushort*)base)[row * w.K + k];
    return format == 16u ? bf16_value(bits) : f16_value(bits);
  }
  device const uint* codes = base + row * (w.K / 32u * format);
  uint bit = format * k, j = bit >> 5, shift = bit & 31u;
  uint q = codes[j] >> shift;
  if (shift + format > 32u) q |= codes[j + 1u] << (32u - shift);
  ulong g = row * (w.K >> group_shift(w.group)) + (k >> group_shift(w.group));
  return metal::fma(bf16_value(w.scales[g]), float(q & ((1u << format) - 1u)), bf16_value(w.biases[g]));
}

#endif
