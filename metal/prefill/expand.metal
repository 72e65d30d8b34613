// expand_rows: w[n] = round(scale*q + bias) of every weight, in device memory: what the products of gemm_kernels.h never hold. Only for comparing
// them with the two-pass form (LILY_KERNEL=gemm=expand). codes, scales, biases -> w act[N,K]. grid: N; 128 threads.
// Bytes moved: the packed matrix, and N*K activations written.
#include "quant.h"

kernel void expand_rows(device const uint* codes [[buffer(0)]], device const ushort* scales [[buffer(1)]], device const ushort* biases [[buffer(2)]],
                        device act* w [[buffer(3)]], constant LilyGemmArgs& args [[buffer(20)]], uint3 group [[threadgroup_position_in_grid]],
                        uint tid [[thread_index_in_threadgroup]]) {
  Weight from;
  from.codes = codes;
  from.scales = scales;
  from.biases = biases;
  from.K = args.K;
  from.group = args.fmt.group;
  for (uint k = tid; k < args.K; k += 128u) w[ulong(group.x) * args.K + k] = round_act(weight_value(W_FORMAT, from, ulong(group.x), k));
}

LILY_INSTANTIATE(expand_rows, expand_rows)
