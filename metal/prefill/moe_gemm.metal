// Grouped products through simdgroup_matrix: moe_gemm_kernels.h says what each computes.
#include "gemm_simdgroup.h"
#include "moe_gemm_kernels.h"

LILY_INSTANTIATE(moe_gemm_rows_m16_r8, moe_gemm_rows, 16, 2048)
LILY_INSTANTIATE(moe_gemm_rows_m32_r8, moe_gemm_rows, 32, 2048)
LILY_INSTANTIATE(moe_gemm_rows_m16_r16, moe_gemm_rows, 16, 4096)
LILY_INSTANTIATE(moe_gemm_rows_m32_r16, moe_gemm_rows, 32, 4096)
LILY_INSTANTIATE(moe_gate_up_rows_m16_r8, moe_gate_up_rows, 16, 2048)
LILY_INSTANTIATE(moe_gate_up_rows_m32_r8, moe_gate_up_rows, 32, 2048)
LILY_INSTANTIATE(moe_gate_up_rows_m16_r16, moe_gate_up_rows, 16, 4096)
LILY_INSTANTIATE(moe_gate_up_rows_m32_r16, moe_gate_up_rows, 32, 4096)
