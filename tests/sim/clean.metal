// Kernels without a mistake: none may be reported, and tests/metal/test_sim_semantics.py knows what each computes and moves.
#include <metal_stdlib>
#include <metal_simdgroup_matrix>
using namespace metal;

struct Numbers { uint n; uint flag; uint a; uint b; };
constant float TABLE[4] = {1.0f, 0.5f, 0.25f, 0.125f};
constant uint STEP [[function_constant(0)]];
constant bool TWICE [[function_constant(1)]];
constant float FACTOR [[function_constant(2)]];

// y[16, threads]: what the functions of a simdgroup give for x.
kernel void lanes(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], uint t [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]], uint threads [[threads_per_threadgroup]]) {
  float v = x[t];
  uint n = uint(v * 8.0f) & 255u;
  y[t] = simd_sum(v);
  y[threads + t] = simd_max(v);
  y[2 * threads + t] = simd_min(v);
  y[3 * threads + t] = simd_shuffle_xor(v, ushort(5));
  y[4 * threads + t] = simd_shuffle_down(v, ushort(3));
  y[5 * threads + t] = simd_shuffle_up(v, ushort(2));
  y[6 * threads + t] = simd_broadcast(v, ushort(7));
  y[7 * threads + t] = simd_shuffle(v, ushort(31 - lane));
  y[8 * threads + t] = simd_prefix_inclusive_sum(v);
  y[9 * threads + t] = simd_prefix_exclusive_sum(v);
  y[10 * threads + t] = float(uint(ulong(simd_vote::vote_t(simd_ballot(v > 0.0f)))) & 0xffffu);
  y[11 * threads + t] = simd_any(v > 100.0f) ? 1.0f : 0.0f;
  y[12 * threads + t] = simd_all(v > -100.0f) ? 1.0f : 0.0f;
  y[13 * threads + t] = float(simd_or(n));
  y[14 * threads + t] = float(simd_and(n));
  y[15 * threads + t] = float(simd_xor(n));
}
LILY_INSTANTIATE(lanes, lanes)

// Rounding: bfloat and half of x, and products and sums in both.
kernel void rounding(device const float* x [[buffer(0)]], device bfloat* b [[buffer(1)]], device half* h [[buffer(2)]], constant Numbers& p [[buffer(20)]], uint i [[thread_position_in_grid]]) {
  if (i >= p.n) return;
  bfloat b0 = bfloat(x[i]), b1 = bfloat(x[(i + 1) % p.n]);
  b[i] = b0;
  b[p.n + i] = b0 * b1;
  b[2 * p.n + i] = b0 + b1;
  half h0 = half(x[i]), h1 = half(x[(i + 1) % p.n]);
  h[i] = h0;
  h[p.n + i] = h0 * h1;
  h[2 * p.n + i] = h0 + h1;
}
LILY_INSTANTIATE(rounding, rounding)

// Vectors: y = {x.w, x.z, x.y, x.x} + 1 for 16 bytes at a time, and the bytes of z taken apart.
kernel void vectors(device const float4* x [[buffer(0)]], device float4* y [[buffer(1)]], device const uint* z [[buffer(2)]], device float4* w [[buffer(3)]], uint t [[thread_index_in_threadgroup]]) {
  float4 v = x[t];
  y[t] = float4(v.w, v.z, v.y, v.x) + 1.0f;
  uchar4 bytes = as_type<uchar4>(z[t]);
  w[t] = float4(bytes) * FACTOR;
}
LILY_INSTANTIATE(vectors, vectors)

// Function constants and a table. y = TABLE[t % 4] * STEP, twice that when TWICE.
kernel void constants(device float* y [[buffer(1)]], uint t [[thread_index_in_threadgroup]]) {
  float v = TABLE[t % 4] * float(STEP);
  y[t] = TWICE ? v + v : v;
}
LILY_INSTANTIATE(constants, constants)

// A sum over all of a row through threadgroup memory, by any number of simdgroups. y[row].
kernel void row_sum(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], constant Numbers& p [[buffer(20)]], uint row [[threadgroup_position_in_grid]], uint t [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]], uint sg [[simdgroup_index_in_threadgroup]], uint threads [[threads_per_threadgroup]]) {
  threadgroup float parts[32];
  float sum = 0.0f;
  for (uint i = t; i < p.n; i += threads) sum += x[row * p.n + i];
  sum = simd_sum(sum);
  if (lane == 0) parts[sg] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float total = 0.0f;
  for (uint s = 0; s < threads / 32; s++) total += parts[s];
  if (t == 0) y[row] = total;
}
LILY_INSTANTIATE(row_sum, row_sum)

// A histogram: in threadgroup memory first, then added to the device's.
kernel void histogram(device const uint* x [[buffer(0)]], device atomic_uint* counts [[buffer(1)]], uint i [[thread_position_in_grid]], uint t [[thread_index_in_threadgroup]]) {
  threadgroup atomic_uint mine[16];
  if (t < 16) atomic_store_explicit(&mine[t], 0u, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  atomic_fetch_add_explicit(&mine[x[i] & 15u], 1u, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (t < 16) atomic_fetch_add_explicit(&counts[t], atomic_load_explicit(&mine[t], memory_order_relaxed), memory_order_relaxed);
}
LILY_INSTANTIATE(histogram, histogram)

// A simdgroup hands over through threadgroup memory again and again; another simdgroup does the same beside it.
kernel void relay(device float* y [[buffer(1)]], uint t [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]], uint sg [[simdgroup_index_in_threadgroup]]) {
  threadgroup float s[64];
  threadgroup float* mine = s + sg * 32;
  mine[lane] = float(lane);
  for (uint i = 0; i < 31; i++) {
    simdgroup_barrier(mem_flags::mem_threadgroup);
    float v = mine[(lane + 1) % 32];
    simdgroup_barrier(mem_flags::mem_threadgroup);
    mine[lane] = v;
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  y[t] = mine[(lane + 1) % 32];
}
LILY_INSTANTIATE(relay, relay)

// y[8, 8] = a b^T, then twice that, through a matrix in threadgroup memory.
template <class T> kernel void product(device const T* a [[buffer(0)]], device const T* b [[buffer(1)]], device float* y [[buffer(2)]]) {
  threadgroup float s[64];
  simdgroup_matrix<T, 8, 8> left, right;
  simdgroup_matrix<float, 8, 8> sum = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  simdgroup_load(left, a, 8);
  simdgroup_load(right, b, 8, ulong2(0, 0), true);
  simdgroup_multiply_accumulate(sum, left, right, sum);
  simdgroup_store(sum, s, 8);
  simdgroup_barrier(mem_flags::mem_threadgroup);
  simdgroup_matrix<float, 8, 8> again, one = simdgroup_matrix<float, 8, 8>(1.0f);
  simdgroup_load(again, s, 8);
  simdgroup_multiply_accumulate(sum, again, one, sum);
  simdgroup_store(sum, y, 8);
}
LILY_INSTANTIATE(product_bfloat, product, bfloat)
LILY_INSTANTIATE(product_half, product, half)

// Reads x with a distance of `a` words between lanes, twice, and writes one word a simdgroup; z is read by all lanes at one place.
kernel void strides(device const float* x [[buffer(0)]], device const float* z [[buffer(1)]], device float* y [[buffer(2)]], constant Numbers& p [[buffer(20)]], uint t [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]], uint sg [[simdgroup_index_in_threadgroup]]) {
  float v = 0.0f;
  for (uint i = 0; i < 2; i++) v += x[t * p.a] * z[i];
  v = simd_sum(v);
  if (lane == 0) y[sg] = v;
}
LILY_INSTANTIATE(strides, strides)

// y[row] is read and written again; the lanes go round an unequal number of times.
kernel void ragged(device float* y [[buffer(1)]], constant Numbers& p [[buffer(20)]], uint t [[thread_index_in_threadgroup]]) {
  for (uint i = t; i < p.n; i += 32) y[i] += 1.0f;
}
LILY_INSTANTIATE(ragged, ragged)
