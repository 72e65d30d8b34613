// The products of prefill through Metal 4's matmul2d, for GPUs with matrix units (M5): language version 4.0, a library of its own.
// gemm_kernels.h and moe_gemm_kernels.h say what each computes. Activations are bfloat; there is no float32 form.
#ifndef LILY_STORAGE_FLOAT32
#include "gemm_tensor.h"
#include "gemm_kernels.h"
#include "moe_gemm_kernels.h"

LILY_INSTANTIATE(gemm_tensor_m16, gemm, 16)
LILY_INSTANTIATE(gemm_tensor_m32, gemm, 32)
LILY_INSTANTIATE(gemm_residual_tensor_m16, gemm_residual, 16)
LILY_INSTANTIATE(gemm_residual_tensor_m32, gemm_residual, 32)
LILY_INSTANTIATE(gate_up_rows_tensor_m16, gate_up_rows, 16)
LILY_INSTANTIATE(gate_up_rows_tensor_m32, gate_up_rows, 32)
LILY_INSTANTIATE(moe_gemm_rows_tensor_m16, moe_gemm_rows, 16)
LILY_INSTANTIATE(moe_gemm_rows_tensor_m32, moe_gemm_rows, 32)
LILY_INSTANTIATE(moe_gate_up_rows_tensor_m16, moe_gate_up_rows, 16)
LILY_INSTANTIATE(moe_gate_up_rows_tensor_m32, moe_gate_up_rows, 32)
#endif
