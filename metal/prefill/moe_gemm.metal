// Grouped products through simdgroup_matrix: moe_gemm_kernels.h says what each computes.
#include "gemm_simdgroup.h"
#include "moe_gemm_kernels.h"

LILY_INSTANTIATE(moe_gemm_rows_m16, moe_gemm_rows, 16)
LILY_INSTANTIATE(moe_gemm_rows_m32, moe_gemm_rows, 32)
LILY_INSTANTIATE(moe_gate_up_rows_m16, moe_gate_up_rows, 16)
LILY_INSTANTIATE(moe_gate_up_rows_m32, moe_gate_up_rows, 32)
