// What the attention kernels share: where things lie, head norm, rope, one block of softmax and a small matrix product.
// Every order of sums here is fixed by absolute positions alone, never by how many rows or heads are computed together.
#pragma once
#include "args.h"
#include "device/cpu/kernel.hpp"
#include "device/cpu/simd.hpp"

namespace lily::cpu::LILY_CPU_NS {

constexpr uint32_t max_head_dim = 256;
constexpr uint32_t max_group_heads = 16;  // query heads of one kv head
constexpr uint32_t key_block = 64;        // keys of one softmax step, at absolute multiples; divides LILY_KV_BLOCK

// One row of qkv: Hq x (D query | D gate), Hkv x D keys, Hkv x D values.
LILY_INLINE const float* query_of(const LilyAttnArgs& a, const float* row, uint32_t head) { return row + 2 * head * a.D; }
LILY_INLINE const float* gate_of(const LilyAttnArgs& a, const float* row, uint32_t head) { return row + (2 * head + 1) * a.D; }
LILY_INLINE const float* key_of(const LilyAttnArgs& a, const float* row, uint32_t head) { return row + (2 * a.Hq + head) * a.D; }
LILY_INLINE const float* value_of(const LilyAttnArgs& a, const float* row, uint32_t head) { return row + (2 * a.Hq + a.Hkv + head) * a.D; }

// Element offset of a position's row in an arena act[blocks][Hkv][256][D].
LILY_INLINE uint64_t arena_offset(const LilyAttnArgs& a, const uint32_t* table, uint32_t position, uint32_t head) {
  return ((uint64_t(table[position / LILY_KV_BLOCK]) * a.Hkv + head) * LILY_KV_BLOCK + position % LILY_KV_BLOCK) * a.D;
}

// out = x / sqrt(mean(x^2) + eps) * w over D
LILY_INLINE void norm_head(const float* x, const float* w, uint32_t D, float eps, float* out) {
  V sum = zero();
  for (uint32_t i = 0; i < D; i += 16) sum = fma(load(x + i), load(x + i), sum);
  V r = splat(1.0f / __builtin_sqrtf(reduce_add(sum) / float(D) + eps));
  for (uint32_t i = 0; i < D; i += 16) store(out + i, mul(mul(load(x + i), r), load(w + i)));
}

// Pair j is (j, j + half) and turns by position * theta^(-j/half), an fp32 product.
struct Rope {
  uint32_t half;
  float frequency[max_head_dim / 2];
  float cos[max_head_dim / 2], sin[max_head_dim / 2];
};

LILY_INLINE void rope_start(Rope& r, const LilyAttnArgs& a) {
  r.half = a.R / 2;
  for (uint32_t j = 0; j < r.half; j++) r.frequency[j] = float(__builtin_pow(double(a.rope_theta), -double(j) / double(r.half)));
}
LILY_INLINE void rope_at(Rope& r, uint32_t position) {
  for (uint32_t j = 0; j < r.half; j++) {
    float angle = float(position) * r.frequency[j];
    r.cos[j] = float(__builtin_cos(double(angle)));
    r.sin[j] = float(__builtin_sin(double(angle)));
  }
}
LILY_INLINE void rope_head(const Rope& r, float* x) {
  for (uint32_t j = 0; j < r.half; j++) {
    float a = x[j], b = x[j + r.half];
    x[j] = a * r.cos[j] - b * r.sin[j];
    x[j + r.half] = b * r.cos[j] + a * r.sin[j];
  }
}

template <class Act>
LILY_INLINE void copy_head(const float* x, uint32_t D, Act* out) {
  for (uint32_t i = 0; i < D; i += 16) store(out + i, load(x + i));
}

// out = round(o * sigmoid(gate))
template <class Act>
LILY_INLINE void gate_head(const float* o, const float* gate, uint32_t D, Act* out) {
  for (uint32_t i = 0; i < D; i += 16) store(out + i, mul(load(o + i), sigmoid(load(gate + i))));
}

constexpr float minus_infinity = -__builtin_inff();

// One step of online softmax over a block of 64 scores, keys(i) of row i real (at least one):
//   m' = max(m, max(scale*s)); decay = exp(m - m'); p = exp(scale*s - m'); l = l*decay + sum(p)
// s becomes p rounded to the storage (0 where masked); the sum takes the unrounded p. decay has room for a multiple of sixteen rows.
template <class Act, class Keys>
LILY_INLINE void softmax_block(float* s, uint32_t rows, Keys keys, float scale, float* m, float* l, float* decay) {
  for (uint32_t i = 0; i < rows; i++) {
    float* x = s + i * key_block;
    for (uint32_t k = keys(i); k < key_block; k++) x[k] = minus_infinity;
    V highest = max(max(load(x), load(x + 16)), max(load(x + 32), load(x + 48)));
    float before = m[i], block = reduce_max(highest) * scale;
    m[i] = before > block ? before : block;
    decay[i] = before - m[i];
  }
  for (uint32_t i = 0; i < rows; i += 16) store(decay + i, exp(load(decay + i)));
  for (uint32_t i = 0; i < rows; i++) {
    float* x = s + i * key_block;
    V now = splat(m[i]), sum[4];
    LILY_UNROLL for (uint32_t j = 0; j < 4; j++) {
      sum[j] = exp(sub(mul(load(x + 16 * j), splat(scale)), now));
      store(x + 16 * j, round_act<Act>(sum[j]));
    }
    l[i] = l[i] * decay[i] + reduce_add(add(add(sum[0], sum[1]), add(sum[2], sum[3])));
  }
}

// c[m][n] = decay[m]*c[m][n] + sum over k ascending of a[m][k]*b[k][n]. Register tiles: what the instruction set has room for.
// Tall tiles turn a value into fp32 once for eight rows.
#if defined(__AVX512F__)
constexpr uint32_t tile_rows = 4, tile_vectors = 4, tall_rows = 8, tall_vectors = 2;
#elif defined(LILY_NEON)
constexpr uint32_t tile_rows = 4, tile_vectors = 1, tall_rows = 0, tall_vectors = 0;
#else
constexpr uint32_t tile_rows = 2, tile_vectors = 2, tall_rows = 0, tall_vectors = 0;
#endif

template <class T>
struct HeadProduct {
  const float* a;
  uint64_t lda;
  const T* b;
  uint64_t ldb, depth;
  float* c;
  uint64_t ldc;
  const float* decay;  // null: 1
  const T* next = nullptr;  // depth * columns values that are wanted after this product, or null
};

template <uint32_t M, uint32_t N, bool fetching, class T>
LILY_INLINE void multiply_tile(const HeadProduct<T>& p, uint32_t row, uint32_t column) {
  const T* b = p.b + column;
  const T* next = fetching ? p.next + p.depth * column : nullptr;
  float* c = p.c + row * p.ldc + column;
  const float* a[M];
  LILY_UNROLL for (uint32_t m = 0; m < M; m++) a[m] = p.a + (row + m) * p.lda;
  V acc[M][N];
  LILY_UNROLL for (uint32_t m = 0; m < M; m++) {
    V d = splat(p.decay ? p.decay[row + m] : 1.0f);
    LILY_UNROLL for (uint32_t n = 0; n < N; n++) acc[m][n] = mul(load(c + m * p.ldc + 16 * n), d);
  }
  for (uint64_t k = 0; k < p.depth; k++, b += p.ldb) {
    V values[N];
    if constexpr (fetching) {
      for (uint32_t i = 0; i < 16 * N; i += 64 / sizeof(T)) __builtin_prefetch(next + i, 0, 2);
      next += 16 * N;
    }
    LILY_UNROLL for (uint32_t n = 0; n < N; n++) values[n] = load(b + 16 * n);
    LILY_UNROLL for (uint32_t m = 0; m < M; m++) {
      V x = splat(a[m][k]);
      LILY_UNROLL for (uint32_t n = 0; n < N; n++) acc[m][n] = fma(x, values[n], acc[m][n]);
    }
  }
  LILY_UNROLL for (uint32_t m = 0; m < M; m++) {
    LILY_UNROLL for (uint32_t n = 0; n < N; n++) store(c + m * p.ldc + 16 * n, acc[m][n]);
  }
}

template <uint32_t M, uint32_t N, bool fetching = false, class T>
LILY_INLINE void multiply_rows_of(const HeadProduct<T>& p, uint32_t row, uint32_t columns) {
  uint32_t n = 0;
  for (; n + 16 * N <= columns; n += 16 * N) multiply_tile<M, N, fetching>(p, row, n);
  for (; n < columns; n += 16) multiply_tile<M, 1, fetching>(p, row, n);
}

template <class T>
static void multiply(const HeadProduct<T>& p, uint32_t rows, uint32_t columns) {
  uint32_t m = 0;
  if constexpr (tall_rows > 0) {
    if (p.next && rows >= tall_rows) {
      multiply_rows_of<tall_rows, tall_vectors, true>(p, 0, columns);
      m = tall_rows;
    }
    for (; m + tall_rows <= rows; m += tall_rows) multiply_rows_of<tall_rows, tall_vectors>(p, m, columns);
  }
  for (; m + tile_rows <= rows; m += tile_rows) multiply_rows_of<tile_rows, tile_vectors>(p, m, columns);
  for (; m < rows; m++) multiply_rows_of<1, tile_vectors>(p, m, columns);
}

}  // namespace lily::cpu::LILY_CPU_NS
