// gemm_tile through simdgroup_matrix, for every Apple GPU. Order of an output's sum: products in ascending steps of 8, one accumulator from zero.
#ifndef LILY_GEMM_SIMDGROUP_H
#define LILY_GEMM_SIMDGROUP_H
#include <metal_simdgroup_matrix>
#include "gemm.h"

// The sums of the tile, [BM][64] floats in raw. PAIR: outputs 0..31 are of `a`, 32..63 of `b`.
template <uint BM, bool PAIR>
inline void gemm_tile(thread const GemmTile& t, threadgroup act* xs, threadgroup act* ws, threadgroup uint* raw, uint tid, uint sg) {
  const CodeRows c = code_rows<PAIR>(t);
  const GemmPlace place = gemm_place<PAIR>(t, tid);
  constexpr uint TILES = BM == 32u ? 4u : 2u;  // of 8 outputs, beside two of 8 rows
  const uint m0 = BM == 32u ? sg / 2u * 16u : 0u, c0 = BM == 32u ? sg % 2u * 32u : sg * 16u;
  simdgroup_matrix<float, 8, 8> sums[2][TILES];
  LILY_UNROLL for (uint i = 0; i < 2u; i++) LILY_UNROLL for (uint j = 0; j < TILES; j++) sums[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);

  uint side = 0u;
  for (uint begin = 0; begin < t.a.K; begin += c.chunk) {
    stage_codes<PAIR>(t, c, begin, raw, tid);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint at = 0; at < c.chunk && begin + at < t.a.K; at += GEMM_STEP) {
      if (GEMM_BUFFERS == 1u && (begin | at) != 0u) threadgroup_barrier(mem_flags::mem_threadgroup);
      threadgroup act* xt = xs + side * BM * GEMM_LD;
      threadgroup act* wt = ws + side * GEMM_OUTPUTS * GEMM_LD;
      stage_step<BM>(t, place, c, begin, at, xt, wt, raw);
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
