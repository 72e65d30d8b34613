// gemm_tile through Metal 4's matmul2d, for GPUs with matrix units (M5): in a library of its own, which may fail to build where the others do not.
// Both operands lie in threadgroup memory, the result in a cooperative tensor whose layout nobody asks for. Order of an output's sum: the
// hardware's within 32 products, steps of 32 ascending; the device compares it with gemm_simdgroup.h before it is used.
#ifndef LILY_GEMM_TENSOR_H
#define LILY_GEMM_TENSOR_H
#include <metal_tensor>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
#include "gemm.h"

template <uint BM, bool PAIR>
inline void gemm_tile(thread const GemmTile& t, threadgroup act* xs, threadgroup act* ws, threadgroup uint* raw, uint tid, uint) {
  const CodeRows c = code_rows<PAIR>(t);
  const GemmPlace place = gemm_place<PAIR>(t, tid);
  typedef tensor<threadgroup act, dextents<int, 2>, tensor_inline> Tile;
  mpp::tensor_ops::matmul2d<mpp::tensor_ops::matmul2d_descriptor(int(BM), 64, 32, false, true, false, mpp::tensor_ops::matmul2d_descriptor::mode::multiply_accumulate),
                            execution_simdgroups<4>> product;
  auto sums = product.template get_destination_cooperative_tensor<Tile, Tile, float>();
  for (ushort i = 0; i < sums.get_capacity(); i++) {
    if (sums.get_mask(i)) sums[i] = 0.0f;
  }
  uint side = 0u;
  for (uint begin = 0; begin < t.a.K; begin += c.chunk) {
    stage_codes<PAIR>(t, c, begin, raw, tid);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint at = 0; at < c.chunk && begin + at < t.a.K; at += GEMM_STEP) {
      threadgroup act* xt = xs + side * BM * GEMM_LD;
      threadgroup act* wt = ws + side * GEMM_OUTPUTS * GEMM_LD;
      stage_step<BM>(t, place, c, begin, at, xt, wt, raw);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      Tile left(xt, dextents<int, 2>(32, int(BM)), array<int, 2>{{1, int(GEMM_LD)}});
      Tile right(wt, dextents<int, 2>(32, 64), array<int, 2>{{1, int(GEMM_LD)}});
      product.run(left, right, sums);
      side = (side + 1u) % GEMM_BUFFERS;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  sums.store(tensor<threadgroup float, dextents<int, 2>, tensor_inline>((threadgroup float*)raw, dextents<int, 2>(64, int(BM))));
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

#endif
