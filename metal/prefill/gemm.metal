// Dense products of a chunk through simdgroup_matrix: gemm_kernels.h says what each computes.
#include "gemm_simdgroup.h"
#include "gemm_kernels.h"

LILY_INSTANTIATE(gemm_m16, gemm, 16)
LILY_INSTANTIATE(gemm_m32, gemm, 32)
LILY_INSTANTIATE(gemm_residual_m16, gemm_residual, 16)
LILY_INSTANTIATE(gemm_residual_m32, gemm_residual, 32)
LILY_INSTANTIATE(gate_up_rows_m16, gate_up_rows, 16)
LILY_INSTANTIATE(gate_up_rows_m32, gate_up_rows, 32)
