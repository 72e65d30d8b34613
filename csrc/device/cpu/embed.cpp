// Embedding look-up: h = scale*q + bias of the token's row (or the plain row), f32. An id outside the vocabulary reads row 0.
// Bytes moved per token: the packed row, 4H written. expand_rows: a whole matrix, for the comparison alone.
#include "device/cpu/dequant_row.hpp"
#include "device/cpu/kernel.hpp"
#include "device/cpu/rms.hpp"

namespace lily::cpu::LILY_CPU_NS {

// step, codes, scales, biases -> h f32[H], ssq f32[H/16]. grid: 1
template <class Act> static void embed_step(const KernelCall& c, uint32_t begin, uint32_t end) {
  const auto& a = args<LilyEmbedArgs>(c);
  const auto& step = *buffer<LilyStep>(c, 0);
  float *h = buffer<float>(c, 4), *ssq = buffer<float>(c, 5);
  if (begin >= end) return;
  uint32_t token = step.token < a.V ? step.token : 0;
  dequant_row(a.fmt, c.buffers[1], c.buffers[2], c.buffers[3], token, a.H, h);
  for (uint32_t i = 0; i < a.H / 16; i++) ssq[i] = ssq_block(h + 16 * i);
}

// step, ids i32[T], codes, scales, biases -> h f32[T,H]. grid: T
template <class Act> static void embed_rows(const KernelCall& c, uint32_t begin, uint32_t end) {
  const auto& a = args<LilyEmbedArgs>(c);
  const auto& step = *buffer<LilyStep>(c, 0);
  const int32_t* ids = buffer<int32_t>(c, 1);
  float* h = buffer<float>(c, 5);
  for (uint32_t t = begin; t < end && t < step.rows; t++) {
    uint32_t token = uint32_t(ids[t]) < a.V ? uint32_t(ids[t]) : 0;
    dequant_row(a.fmt, c.buffers[2], c.buffers[3], c.buffers[4], token, a.H, h + uint64_t(t) * a.H);
  }
}

// codes, scales, biases -> w act[N,K], rounded. grid: N
template <class Act> static void expand_rows(const KernelCall& c, uint32_t begin, uint32_t end) {
  const auto& a = args<LilyGemmArgs>(c);
  float row[1024];
  for (uint32_t n = begin; n < end; n++)
    for (uint32_t k = 0; k < a.K; k += 1024) {
      const uint32_t count = a.K - k < 1024 ? a.K - k : 1024;
      dequant_part(a.fmt, c.buffers[0], c.buffers[1], c.buffers[2], n, a.K, k, count, row);
      for (uint32_t i = 0; i < count; i += 16) store(buffer<Act>(c, 3) + uint64_t(n) * a.K + k + i, load(row + i));
    }
}

}  // namespace lily::cpu::LILY_CPU_NS

LILY_KERNELS(embed, {"expand_rows", expand_rows<Bf16>, expand_rows<F32>}, {"embed_step", embed_step<Bf16>, embed_step<F32>}, {"embed_rows", embed_rows<Bf16>, embed_rows<F32>})
