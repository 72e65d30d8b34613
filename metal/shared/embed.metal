// Embedding look-up: h = fma(scale, q, bias) of the token's row (or the plain row), f32. An id outside of the vocabulary reads row 0.
// A lane makes one value, neighbours make neighbours: h is written in whole lines, and a simdgroup asks for 32 neighbouring codes.
// One row of the table is read.
#include "lily.h"
#include "quant.h"
#include "reduce.h"

// embed_step. step, codes, scales, biases -> h f32[H], ssq f32[H/16] (order in reduce.h). grid: 1 threadgroup of 512
kernel void embed_step(constant LilyStep& step [[buffer(0)]], device const uint* codes [[buffer(1)]], device const ushort* scales [[buffer(2)]],
                       device const ushort* biases [[buffer(3)]], device float* h [[buffer(4)]], device float* ssq [[buffer(5)]],
                       constant LilyEmbedArgs& args [[buffer(20)]], uint thread_index [[thread_index_in_threadgroup]],
                       uint threads [[threads_per_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  const uint H = args.H, token = step.token < args.V ? step.token : 0u;
  Weight w = {codes, scales, biases, H, args.fmt.group};
  for (uint i = thread_index; i < (H + 31u) / 32u * 32u; i += threads) {
    float value = 0.0f;
    if (i < H) {
      value = weight_value(W_FORMAT, w, token, i);
      h[i] = value;
    }
    float partial = ssq_fold(value);
    if (lane % LILY_SSQ_BLOCK == 0u && i < H) ssq[i / LILY_SSQ_BLOCK] = partial;
  }
}
LILY_INSTANTIATE(embed_step, embed_step)

// embed_rows. step, ids i32[T], codes, scales, biases -> h f32[T,H]. grid: T threadgroups of 256, idle past step.rows
kernel void embed_rows(constant LilyStep& step [[buffer(0)]], device const int* ids [[buffer(1)]], device const uint* codes [[buffer(2)]],
                       device const ushort* scales [[buffer(3)]], device const ushort* biases [[buffer(4)]], device float* h [[buffer(5)]],
                       constant LilyEmbedArgs& args [[buffer(20)]], uint t [[threadgroup_position_in_grid]],
                       uint thread_index [[thread_index_in_threadgroup]], uint threads [[threads_per_threadgroup]]) {
  if (t >= step.rows) return;
  const uint H = args.H, id = uint(ids[t]), token = id < args.V ? id : 0u;
  Weight w = {codes, scales, biases, H, args.fmt.group};
  device float* out = h + ulong(t) * H;
  for (uint i = thread_index; i < H; i += threads) out[i] = weight_value(W_FORMAT, w, token, i);
}
LILY_INSTANTIATE(embed_rows, embed_rows)
