// Kernels that use the whole subset and must not be flagged.
#include <metal_stdlib>
#include <metal_simdgroup_matrix>
#include "args.h"
using namespace metal;

#ifdef LILY_STORAGE_FLOAT32
typedef float stored;
#else
typedef bfloat stored;
#endif

constant uint FORMAT [[function_constant(0)]];
constant bool FAST [[function_constant(7)]];
constant float SCALES[4] = {1.0f, 2.0f, 0.5f, 1e-3f};
constant constexpr uint LANES = 32;
static_assert(sizeof(LilyStep) == 48, "the host and the kernels lay LilyStep out alike");

template <int BITS>
struct Field {
  static inline uint at(device const uint* words, uint i) { return (words[i * BITS / 32] >> (i * BITS % 32)) & ((1u << BITS) - 1u); }
};

// The same helper over device and threadgroup memory.
template <typename P>
inline float sum4(P p) {
  return float(p[0]) + float(p[1]) + float(p[2]) + float(p[3]);
}

inline void split(float v, thread float& whole, thread float& part) {
  whole = floor(v);
  part = v - whole;
}

/* A product is no pointer: a * b, (a) * b, a[i] * -b. */
inline float products(float a, float b, thread const float* x, uint i) {
  float c = a * b;
  c *= (a) * b + x[i * 2] * -b;
  if (c > a && c < b) c = i & 1u ? c : a;
  return c;
}

template <typename T, int ROWS>
kernel void rows(device const T* x [[buffer(0)]], device float* y [[buffer(1)]], device const uint* codes [[buffer(2)]], device atomic_uint* seen [[buffer(3)]],
                 constant LilyNormArgs& args [[buffer(20)]], constant uint& present [[buffer(21)]], uint2 group [[threadgroup_position_in_grid]],
                 uint lane [[thread_index_in_simdgroup]], uint simd [[simdgroup_index_in_threadgroup]]) {
  threadgroup float tile[ROWS * 8][LANES / 4];
  threadgroup uint total;
  device const uint4* wide = (device const uint4*)(codes + group.y);
  uint4 w = *(device const uint4*)codes + wide[0];
  threadgroup float* row = tile[simd];
  thread const float* none = nullptr;
  float whole, part, acc[ROWS];
  for (int r = 0; r < ROWS; ++r) acc[r] = 0.0f;
  split(float(x[group.x]), whole, part);
  if (lane < 8) row[lane] = part * SCALES[lane % 4];
  if (lane == 0 && simd == 0) total = 0;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (present & 1u) atomic_fetch_add_explicit(seen, 1u, memory_order_relaxed);
  if (FORMAT == 4) acc[0] = float(Field<4>::at(codes, lane) + w.x) + sum4(row) + sum4(x);
  if (FAST) acc[0] = fast::exp(acc[0]);
  const float larger = simd_max((lane < 8 && FAST) ? acc[0] : 0.0f), both = (FAST ? 1.0f : 2.0f) * simd_sum(larger);
  acc[0] += both;
  const float sum = simd_sum(acc[0]) + (none ? none[0] : 0.0f);
  if (lane == 0) y[group.x * args.H + simd] = fma(sum, rsqrt(args.eps), float(total));
}
LILY_INSTANTIATE(rows_1, rows, stored, 1)
LILY_INSTANTIATE(rows_4, rows, float, 4)

kernel void product(device const stored* a [[buffer(0)]], device float* y [[buffer(1)]], uint simd [[simdgroup_index_in_threadgroup]]) {
  threadgroup stored b[64];
  b[simd] = stored(1.0f);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  simdgroup_matrix<stored, 8, 8> left, right;
  simdgroup_matrix<float, 8, 8> sums = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  simdgroup_load(left, a, 8);
  simdgroup_load(right, b, 8, ulong2(0, 0), true);
  simdgroup_multiply_accumulate(sums, left, right, sums);
  simdgroup_store(sums, y, 8);
}
LILY_INSTANTIATE(product, product)
