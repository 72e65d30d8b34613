// Mistakes with the matrices of a simdgroup. One kernel is layout-dependent: the mistake that a scrambled layout shows.
#include <metal_stdlib>
#include <metal_simdgroup_matrix>
using namespace metal;

struct Numbers { uint n; uint flag; uint a; uint b; };

// flag 1: no barrier between storing and loading in one simdgroup. flag 2: the sum starts uninitialised.
kernel void matrix_hand_over(device const bfloat* x [[buffer(0)]], device float* y [[buffer(1)]], constant Numbers& p [[buffer(20)]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float s[64];
  s[lane] = s[lane + 32] = 0.0f;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  simdgroup_matrix<bfloat, 8, 8> a;
  simdgroup_matrix<float, 8, 8> sum, copy;
  if (p.flag != 2) sum = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  simdgroup_load(a, x, 8);
  simdgroup_multiply_accumulate(sum, a, a, sum);
  simdgroup_store(sum, s, 8);
  if (p.flag != 1) simdgroup_barrier(mem_flags::mem_threadgroup);
  simdgroup_load(copy, s, 8);
  simdgroup_store(copy, y, 8);
}
LILY_INSTANTIATE(matrix_hand_over, matrix_hand_over)

// flag 1: half of the lanes load another matrix.
kernel void matrix_divergence(device const bfloat* x [[buffer(0)]], device float* y [[buffer(1)]], constant Numbers& p [[buffer(20)]], uint lane [[thread_index_in_simdgroup]]) {
  simdgroup_matrix<bfloat, 8, 8> a;
  simdgroup_matrix<float, 8, 8> sum = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  simdgroup_load(a, x + (p.flag == 1 && lane < 16 ? 64 : 0), 8);
  simdgroup_multiply_accumulate(sum, a, a, sum);
  simdgroup_store(sum, y, 8);
}
LILY_INSTANTIATE(matrix_divergence, matrix_divergence)

// flag 1: counts on the places of a lane's elements.
kernel void matrix_layout(device float* y [[buffer(1)]], constant Numbers& p [[buffer(20)]], uint lane [[thread_index_in_simdgroup]]) {
  simdgroup_matrix<float, 8, 8> m = make_filled_simdgroup_matrix<float, 8, 8>(1.0f);
  if (p.flag == 1) m.thread_elements()[0] = float(lane);
  simdgroup_store(m, y, 8);
}
LILY_INSTANTIATE(matrix_layout, matrix_layout)
