// Dense products of a chunk through simdgroup_matrix: gemm_kernels.h says what each computes.
#include "gemm_simdgroup.h"
#include "gemm_kernels.h"

// RAW 2048: weights of up to 4 bits and plain ones; 4096: 5, 6 and 8 bits.
LILY_INSTANTIATE(gemm_m16_r8, gemm, 16, 2048)
LILY_INSTANTIATE(gemm_m32_r8, gemm, 32, 2048)
LILY_INSTANTIATE(gemm_m16_r16, gemm, 16, 4096)
LILY_INSTANTIATE(gemm_m32_r16, gemm, 32, 4096)
LILY_INSTANTIATE(gemm_residual_m16_r8, gemm_residual, 16, 2048)
LILY_INSTANTIATE(gemm_residual_m32_r8, gemm_residual, 32, 2048)
LILY_INSTANTIATE(gemm_residual_m16_r16, gemm_residual, 16, 4096)
LILY_INSTANTIATE(gemm_residual_m32_r16, gemm_residual, 32, 4096)
LILY_INSTANTIATE(gate_up_rows_m16_r8, gate_up_rows, 16, 2048)
LILY_INSTANTIATE(gate_up_rows_m32_r8, gate_up_rows, 32, 2048)
LILY_INSTANTIATE(gate_up_rows_m16_r16, gate_up_rows, 16, 4096)
LILY_INSTANTIATE(gate_up_rows_m32_r16, gate_up_rows, 32, 4096)
