// The dot products of decode: rows of a weight, each times one vector x, with w = scale*q + bias in fp32, unrounded.
// Order of the sums of a row (contract: fused kernels and twins share it, however rows are grouped):
//   lanes: acc = sum over vectors of 16 groups of bias * xsum, ascending; then per step: partial = sum of q*x, acc = fma(scale, partial, acc);
//   4 bits and bf16 x: partial in integers, in units of fixed_point.hpp, acc = fma(scale * unit, partial, acc), except in the portable form;
//   y = the lanes of acc, folded by halves.
// A step is 128 codes of 4 bits (16 words; lane i holds codes 8i..8i+7, so x is permuted once per kernel call), 64 codes of 8 bits,
// one group of any other width, or 16 plain values.
#pragma once
#include <type_traits>

#include "device/cpu/fixed_point.hpp"
#include "device/cpu/rms.hpp"
#include "device/cpu/weight.hpp"

namespace lily::cpu::LILY_CPU_NS {

// The vector as the rows of one format want it.
struct Input {
  const float* x;     // K values in the order of the steps, zeros up to a multiple of 128
  const float* sums;  // sum of x per group, zeros up to a multiple of 16
  FixedPoint fixed;   // instead of x, where it is bf16 and the weight has 4 bits in groups of 64
};

LILY_INLINE uint32_t vector_floats(uint32_t K) { return round_up(K, 128); }
// Floats that arrange() needs.
LILY_INLINE uint32_t arranged_floats(const Weight& w) { return fixed_point_floats(vector_floats(w.K)) + round_up(w.groups, 16); }

LILY_INLINE bool same_format(const LilyFormat& a, const LilyFormat& b) { return a.kind == b.kind && a.bits == b.bits && a.group == b.group; }

// Puts a vector of vector_floats(K) in order; `scratch` holds what is not `natural` itself.
template <class Act> static Input arrange(const Weight& w, const float* natural, float* scratch) {
  float* sums = scratch + fixed_point_floats(vector_floats(w.K));
  for (uint32_t g = 0; g < round_up(w.groups, 16); g++) {
    V s = zero();
    for (uint32_t i = 0; g < w.groups && i < w.fmt.group; i += 16) s = add(s, load(natural + g * w.fmt.group + i));
    sums[g] = reduce_add(s);
  }
  if (!w.fast(4)) return {natural, sums, {}};
#if defined(LILY_FIXED_POINT)
  if constexpr (sizeof(Act) == sizeof(Bf16)) return {nullptr, sums, fixed_point(natural, vector_floats(w.K), scratch)};
#endif
  uint32_t stride[16];
  for (uint32_t i = 0; i < 16; i++) stride[i] = 32 * i;
  const U every_eighth = loadu(stride);
  for (uint32_t j = 0; j < w.K; j += 128)
    for (uint32_t k = 0; k < 8; k++) store(scratch + j + 16 * k, from_bits(gather_u32(natural + j + k, every_eighth)));
  return {scratch, sums, {}};
}

// Activations as floats, zero-padded for arrange().
template <class Act> static void expand(const Act* x, uint32_t K, float* out) {
  for (uint32_t i = 0; i < K; i += 16) store(out + i, load(x + i));
  for (uint32_t i = K; i < vector_floats(K); i++) out[i] = 0;
}

// x = round((h * r) * weight), r from the partial sums of squares.
template <class Act> static void expand_normed(const float* h, const float* ssq, const float* weight, uint32_t K, float eps, float* out) {
  float r = rms_scale(ssq, K, eps);
  for (uint32_t i = 0; i < K; i += 16) store(out + i, rms_apply<Act>(load(h + i), r, load(weight + i)));
  for (uint32_t i = K; i < vector_floats(K); i++) out[i] = 0;
}

// Eight bf16 values in the lower half of the lanes.
LILY_INLINE V load_bf16_half(const void* p) {
#if defined(__AVX512F__)
  return from_bits(shl<16>(U{_mm512_cvtepu16_epi32(_mm256_zextsi128_si256(_mm_loadu_si128((const __m128i*)p)))}));
#elif defined(__AVX2__)
  return from_bits(shl<16>(U{_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), _mm256_setzero_si256()}));
#elif defined(LILY_NEON)
  return from_bits(shl<16>(widen(load_halves(p), vdupq_n_u16(0))));
#else
  uint16_t t[16] = {};
  std::memcpy(t, p, 16);
  return load_bf16(t);
#endif
}

// n of 16 values, the others zero and not read.
LILY_OUTLINE V load_bf16_some(const void* p, uint32_t n) {
  uint8_t tail[32] = {};
  std::memcpy(tail, p, 2 * n);
  return load_bf16(tail);
}
// Where R rows' sums begin: the part of their biases.
template <uint32_t R> LILY_INLINE void bias_part(const uint8_t* biases, const float* sums, uint32_t groups, V* acc) {
  const uint64_t stride = 2 * uint64_t(groups);
  uint32_t g = 0;
  LILY_UNROLL for (uint32_t r = 0; r < R; r++) acc[r] = zero();
  for (; g + 16 <= groups; g += 16) LILY_UNROLL for (uint32_t r = 0; r < R; r++) acc[r] = fma(load_bf16(biases + r * stride + 2 * g), load(sums + g), acc[r]);
  if (groups - g == 8) {
    LILY_UNROLL for (uint32_t r = 0; r < R; r++) acc[r] = fma(load_bf16_half(biases + r * stride + 2 * g), load(sums + g), acc[r]);
  } else if (g < groups) {
    LILY_UNROLL for (uint32_t r = 0; r < R; r++) acc[r] = fma(load_bf16_some(biases + r * stride + 2 * g, groups - g), load(sums + g), acc[r]);
  }
}

// How far ahead codes are fetched: into the rows after those at hand, and far enough to hide memory when rows are short.
LILY_INLINE uint64_t prefetch_distance(uint64_t rows_bytes) { return rows_bytes > 4096 ? rows_bytes : 4096; }
// The first codes of a range, while its vector is still being made ready.
LILY_INLINE void prefetch_first(const Weight& w, uint64_t row) {
  for (uint32_t i = 0; i < 4096; i += 64) __builtin_prefetch(w.row(row) + i, 0, 2);
}
// The next R rows' scales and biases.
template <uint32_t R> LILY_INLINE void prefetch_groups(const uint8_t* scales, const uint8_t* biases, uint64_t row_bytes) {
  for (uint64_t i = 0; i < R * row_bytes; i += 64) {
    __builtin_prefetch(scales + R * row_bytes + i);
    __builtin_prefetch(biases + R * row_bytes + i);
  }
}

// The low four bits of each lane as a float.
LILY_INLINE V nibble(U c, V table) {
#if defined(__AVX512F__)
  return permute(table, c);
#else
  (void)table;
  return to_float(andu(c, splatu(15)));
#endif
}
// Keeps a loaded vector in its register: folded into seven shifts, a load that crosses a cache line would be paid seven times.
LILY_INLINE U held(U c) {
#if defined(__AVX512F__)
  __asm__("" : "+v"(c.v));
#elif defined(__AVX2__)
  __asm__("" : "+x"(c.lo), "+x"(c.hi));
#endif
  return c;
}
// Two neighbouring scales: the first in lanes 0-7, the second in lanes 8-15.
LILY_INLINE V scale_pair(const uint8_t* p) {
  uint32_t two = load_any<uint32_t>(p);
#if defined(__AVX512F__)
  const __m512i select = _mm512_set_epi64(0x0302808003028080ll, 0x0302808003028080ll, 0x0302808003028080ll, 0x0302808003028080ll, 0x0100808001008080ll, 0x0100808001008080ll,
                                          0x0100808001008080ll, 0x0100808001008080ll);
  return {_mm512_castsi512_ps(_mm512_shuffle_epi8(_mm512_set1_epi32(int(two)), select))};
#elif defined(__AVX2__)
  return {_mm256_set1_ps(bits_float(two << 16)), _mm256_set1_ps(bits_float(two & 0xffff0000u))};
#elif defined(LILY_NEON)
  float32x4_t one = vdupq_n_f32(bits_float(two << 16)), other = vdupq_n_f32(bits_float(two & 0xffff0000u));
  return {one, one, other, other};
#else
  V r;
  for (int i = 0; i < 16; i++) r.v[i] = bits_float(i < 8 ? two << 16 : two & 0xffff0000u);
  return r;
#endif
}

// Rows of 4 bits that are read side by side, and steps of each that are computed together: more of both keep the units busy, fewer rows are nearer to one
// stream of memory.
#if defined(__AVX512F__)
constexpr uint32_t kSideBySide = 2, kDepth = 2;
#else
constexpr uint32_t kSideBySide = 4, kDepth = 1;
#endif

#if defined(__AVX2__) || defined(__AVX512F__) || defined(LILY_NEON)
constexpr uint32_t kRowsAtOnce = 4;
#else
constexpr uint32_t kRowsAtOnce = 1;
#endif

// Each of these computes n rows from `first`, some at once, to hide the latency of their chains; how many never changes a row's bits.
// Step computes the 128 products of a step: the sum over each lane's eight, and the factor that it is multiplied with.
// kK is K where it is known beforehand, else 0: with short rows, what goes round the products costs as much as a quarter of them.
template <class Step> struct DotAffine4 {
  struct Rows {
    const uint8_t *codes, *scales, *biases;
    uint64_t row_bytes, scale_bytes;
    template <uint32_t R> __attribute__((always_inline)) void advance() { codes += R * row_bytes, scales += R * scale_bytes, biases += R * scale_bytes; }
  };
  template <uint32_t R> LILY_INLINE void rows(const Rows& at, const Step& step, const float* sums, uint32_t K, float* y) {
    constexpr uint32_t side = R < kSideBySide ? R : kSideBySide;
    const uint64_t row_bytes = at.row_bytes, scale_bytes = at.scale_bytes, ahead = prefetch_distance(side * row_bytes);
    const uint32_t steps = K / 128, paired = steps / kDepth * kDepth;
    prefetch_groups<R>(at.scales, at.biases, scale_bytes);
    V acc[R];
    bias_part<R>(at.biases, sums, uint32_t(scale_bytes / 2), acc);
    // `depth` steps of `side` rows
    auto block = [&](auto depth, uint32_t q, uint32_t s) __attribute__((always_inline)) {
      constexpr uint32_t n = depth.value;
      U c[n * side];
      V products[n * side];
      LILY_UNROLL for (uint32_t i = 0; i < n; i++) LILY_UNROLL for (uint32_t r = 0; r < side; r++) {
        const uint8_t* p = at.codes + (q + r) * row_bytes + 64 * uint64_t(s + i);
        __builtin_prefetch(p + ahead);
        c[i * side + r] = held(loadu(p));
      }
      step.template products<n, side>(c, s, products);
      LILY_UNROLL for (uint32_t i = 0; i < n; i++) LILY_UNROLL for (uint32_t r = 0; r < side; r++)
        acc[q + r] = fma(step.factor(scale_pair(at.scales + (q + r) * scale_bytes + 4 * uint64_t(s + i)), s + i), products[i * side + r], acc[q + r]);
    };
    LILY_UNROLL for (uint32_t q = 0; q < R; q += side) {
      for (uint32_t s = 0; s < paired; s += kDepth) block(std::integral_constant<uint32_t, kDepth>(), q, s);
      for (uint32_t s = paired; s < steps; s++) block(std::integral_constant<uint32_t, 1>(), q, s);
    }
    if (K % 128)
      LILY_UNROLL for (uint32_t r = 0; r < R; r++) {
        uint8_t half[64] = {};
        std::memcpy(half, at.codes + r * row_bytes + 64 * uint64_t(steps), 32);
        const U c = loadu(half);
        V products;
        step.template products<1, 1>(&c, steps, &products);
        acc[r] = fma(step.factor(splat(bf16_at(at.scales + r * scale_bytes + 4 * uint64_t(steps))), steps), products, acc[r]);
      }
    reduce_rows<R>(acc, y);
  }
  template <uint32_t kK> static void run_of(const Weight& w, const Input& in, uint64_t first, uint32_t n, float* y) {
    const Step step(in);
    const uint32_t K = kK ? kK : w.K;
    const float* sums = in.sums;
    Rows at{w.row(first), w.row_scales(first), w.row_biases(first), K / 2, K / 64 * 2};
    for (; n >= kRowsAtOnce; n -= kRowsAtOnce, y += kRowsAtOnce, at.template advance<kRowsAtOnce>()) rows<kRowsAtOnce>(at, step, sums, K, y);
    for (; n; n--, y++, at.template advance<1>()) rows<1>(at, step, sums, K, y);
  }
  static void run(const Weight& w, const Input& in, uint64_t first, uint32_t n, float* y) {
    if constexpr (Step::kKnownWidths) {
      if (w.K == 512) return run_of<512>(w, in, first, n, y);
      if (w.K == 2048) return run_of<2048>(w, in, first, n, y);
      if (w.K == 4096) return run_of<4096>(w, in, first, n, y);
    }
    run_of<0>(w, in, first, n, y);
  }
};

// In fp32: a look-up and a multiply-add for each code.
struct FloatStep {
  static constexpr bool kKnownWidths = false;
  const float* x;
  V table;
  explicit FloatStep(const Input& in) : x(in.x), table(digits()) {}
  __attribute__((always_inline)) V factor(V scales, uint32_t) const { return scales; }
  template <uint32_t depth, uint32_t side> __attribute__((always_inline)) void products(const U* c, uint32_t s, V* out) const {
    LILY_UNROLL for (uint32_t i = 0; i < depth * side; i++) {
      const float* at = x + 128 * (s + i / side);
      V p = mul(nibble(c[i], table), load(at));
      p = fma(nibble(shr<4>(c[i]), table), load(at + 16), p);
      p = fma(nibble(shr<8>(c[i]), table), load(at + 32), p);
      p = fma(nibble(shr<12>(c[i]), table), load(at + 48), p);
      p = fma(nibble(shr<16>(c[i]), table), load(at + 64), p);
      p = fma(nibble(shr<20>(c[i]), table), load(at + 80), p);
      p = fma(nibble(shr<24>(c[i]), table), load(at + 96), p);
      out[i] = fma(nibble(shr<28>(c[i]), table), load(at + 112), p);
    }
  }
};

#if defined(LILY_FIXED_POINT)
// In integers, exactly.
template <bool vnni> struct FixedStep {
#if defined(__SANITIZE_ADDRESS__)
  static constexpr bool kKnownWidths = false;  // the same code, a quarter of the time to compile it with checks
#else
  static constexpr bool kKnownWidths = true;
#endif
  FixedPoint x;
  explicit FixedStep(const Input& in) : x(in.fixed) {}
  __attribute__((always_inline)) V factor(V scales, uint32_t s) const { return mul(scales, load(x.units + 16 * s)); }
  template <uint32_t depth, uint32_t side> __attribute__((always_inline)) void products(const U* c, uint32_t s, V* out) const { fixed_dots<vnni, depth, side>(c, x.digits + kDigitBytes * s, out); }
};
#endif

struct DotAffine8 {
  template <uint32_t R> static void run(const Weight& w, const Input& in, uint64_t first, float* y) {
    const uint8_t* codes = w.row(first);
    const uint8_t* scales = w.row_scales(first);
    prefetch_groups<R>(w.row_scales(first), w.row_biases(first), w.groups * 2ull);
    V acc[R];
    bias_part<R>(w.row_biases(first), in.sums, w.groups, acc);
    const uint64_t ahead = prefetch_distance(R * w.row_bytes);
    for (uint32_t g = 0; g < w.groups; g++) {
      const float* x = in.x + 64 * g;
      LILY_UNROLL for (uint32_t r = 0; r < R; r++) {
        const uint8_t* p = codes + r * w.row_bytes + 64 * g;
        __builtin_prefetch(p + ahead);
        V q = mul(to_float(load_u8(p)), load(x));
        q = fma(to_float(load_u8(p + 16)), load(x + 16), q);
        q = fma(to_float(load_u8(p + 32)), load(x + 32), q);
        q = fma(to_float(load_u8(p + 48)), load(x + 48), q);
        acc[r] = fma(splat(bf16_at(scales + (r * uint64_t(w.groups) + g) * 2)), q, acc[r]);
      }
    }
    reduce_rows<R>(acc, y);
  }
};

struct DotAffineAny {
  template <uint32_t R> static void run(const Weight& w, const Input& in, uint64_t first, float* y) {
    const CodeReader reader(w.fmt.bits);
    for (uint32_t r = 0; r < R; r++) {
      const uint8_t *codes = w.row(first + r), *scales = w.row_scales(first + r);
      V acc;
      bias_part<1>(w.row_biases(first + r), in.sums, w.groups, &acc);
      for (uint32_t g = 0; g < w.groups; g++) {
        V q = zero();
        for (uint32_t i = 0; i < w.fmt.group; i += 16) {
          uint32_t j = g * w.fmt.group + i;
          q = fma(reader.read(codes, w.row_bytes, j), load(in.x + j), q);
        }
        acc = fma(splat(bf16_at(scales + 2 * g)), q, acc);
      }
      y[r] = reduce_add(acc);
    }
  }
};

template <uint32_t kind> struct DotPlain {
  template <uint32_t R> static void run(const Weight& w, const Input& in, uint64_t first, float* y) {
    const uint8_t* p = w.row(first);
    V acc[R];
    LILY_UNROLL for (uint32_t r = 0; r < R; r++) acc[r] = zero();
    for (uint32_t j = 0; j < w.K; j += 16) LILY_UNROLL for (uint32_t r = 0; r < R; r++) {
        const uint8_t* at = p + r * w.row_bytes + j * (kind == LILY_W_F32 ? 4 : 2);
        V v;
        if constexpr (kind == LILY_W_BF16)
          v = load_bf16(at);
        else if constexpr (kind == LILY_W_F16)
          v = load_f16(at);
        else
          v = from_bits(loadu(at));
        acc[r] = fma(v, load(in.x + j), acc[r]);
      }
    reduce_rows<R>(acc, y);
  }
};

template <class Dot> static void dot_each(const Weight& w, const Input& in, uint64_t first, uint32_t n, float* y) {
  for (; n >= kRowsAtOnce; n -= kRowsAtOnce, first += kRowsAtOnce, y += kRowsAtOnce) Dot::template run<kRowsAtOnce>(w, in, first, y);
  for (; n; n--, first++, y++) Dot::template run<1>(w, in, first, y);
}

// y[i] = row (first + i) of w times x, for n rows.
static void dot_rows(const Weight& w, const Input& in, uint64_t first, uint32_t n, float* y) {
#if defined(LILY_FIXED_POINT)
  if (in.fixed.digits) return byte_products() ? DotAffine4<FixedStep<true>>::run(w, in, first, n, y) : DotAffine4<FixedStep<false>>::run(w, in, first, n, y);
#endif
  if (w.fast(4)) return DotAffine4<FloatStep>::run(w, in, first, n, y);
  if (w.fast(8)) return dot_each<DotAffine8>(w, in, first, n, y);
  switch (w.fmt.kind) {
    case LILY_W_AFFINE: return dot_each<DotAffineAny>(w, in, first, n, y);
    case LILY_W_BF16: return dot_each<DotPlain<LILY_W_BF16>>(w, in, first, n, y);
    case LILY_W_F16: return dot_each<DotPlain<LILY_W_F16>>(w, in, first, n, y);
    default: return dot_each<DotPlain<LILY_W_F32>>(w, in, first, n, y);
  }
}

}  // namespace lily::cpu::LILY_CPU_NS
