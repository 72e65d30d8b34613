// Mistakes with matmul2d.
#include <metal_stdlib>
#include <metal_tensor>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
using namespace metal;

struct Numbers { uint n; uint flag; uint a; uint b; };

// y[50, 64] = x[50, 64] w[64, 64]^T in tiles of 32 rows. flag 1: no barrier between staging w and using it. flag 2: none between using it and staging
// again. flag 3: one simdgroup leaves the last run out.
kernel void tensor_product(device bfloat* x [[buffer(0)]], device const bfloat* w [[buffer(1)]], device float* y [[buffer(2)]], constant Numbers& p [[buffer(20)]], uint g [[threadgroup_position_in_grid]], uint t [[thread_index_in_threadgroup]], uint sg [[simdgroup_index_in_threadgroup]]) {
  threadgroup bfloat staged[64 * 32];
  for (uint i = t; i < 64 * 32; i += 128) staged[i] = bfloat(0.0f);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  auto left = tensor(x, dextents<int, 2>(64, int(p.n)));
  auto right = tensor(staged, dextents<int, 2>(32, 64));
  auto target = tensor(y, dextents<int, 2>(64, int(p.n)));
  mpp::tensor_ops::matmul2d<mpp::tensor_ops::matmul2d_descriptor(32, 64, 32, false, true, false, mpp::tensor_ops::matmul2d_descriptor::mode::multiply_accumulate), execution_simdgroups<4>> product;
  auto sum = product.template get_destination_cooperative_tensor<decltype(left), decltype(right), float>();
  for (uint i = 0; i < sum.get_capacity(); i++) {
    if (sum.get_mask(i)) sum[i] = 0.0f;
  }
  for (uint k = 0; k < 64; k += 32) {
    for (uint i = t; i < 64 * 32; i += 128) staged[i] = w[i / 32 * 64 + k + i % 32];
    if (p.flag != 1) threadgroup_barrier(mem_flags::mem_threadgroup);
    auto a = left.slice(int(k), int(g * 32));
    auto b = right.slice(0, 0);
    if (p.flag != 3 || k == 0 || sg != 2) product.run(a, b, sum);
    if (p.flag != 2) threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  auto c = target.slice(0, int(g * 32));
  sum.store(c);
}
LILY_INSTANTIATE(tensor_product, tensor_product)
