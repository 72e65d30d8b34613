// RMS norms and the residual stream. x = round((h * r) * weight), r = 1/sqrt(mean(h^2) + eps); order of sums in rms.hpp.
#include "args.h"
#include "device/cpu/kernel.hpp"
#include "device/cpu/rms.hpp"

namespace lily::cpu::LILY_CPU_NS {

// step, h f32[T,H], weight f32[H] -> x act[T,H]. grid: T. Bytes per row: 4H read, 2H written.
template <class Act> static void rmsnorm_rows(const KernelCall& c, uint32_t begin, uint32_t end) {
  const auto& a = args<LilyNormArgs>(c);
  const auto& step = *buffer<LilyStep>(c, 0);
  const float *h = buffer<float>(c, 1), *weight = buffer<float>(c, 2);
  Act* x = buffer<Act>(c, 3);
  for (uint32_t t = begin; t < end && t < step.rows; t++) {
    const float* row = h + uint64_t(t) * a.H;
    Act* out = x + uint64_t(t) * a.H;
    float total = ssq_block(row);
    for (uint32_t i = 16; i < a.H; i += 16) total += ssq_block(row + i);
    float r = rms_from_total(total, a.H, a.eps);
    for (uint32_t i = 0; i < a.H; i += 16) store(out + i, rms_apply<Act>(load(row + i), r, load(weight + i)));
  }
}

// h f32[H], ssq f32[H/16], weight f32[H] -> x act[H], hidden f32[H] = h (may be absent). grid: 1
template <class Act> static void norm_final(const KernelCall& c, uint32_t begin, uint32_t end) {
  const auto& a = args<LilyNormArgs>(c);
  const float *h = buffer<float>(c, 0), *ssq = buffer<float>(c, 1), *weight = buffer<float>(c, 2);
  Act* x = buffer<Act>(c, 3);
  float* hidden = buffer<float>(c, 4);
  if (begin >= end) return;
  float r = rms_scale(ssq, a.H, a.eps);
  for (uint32_t i = 0; i < a.H; i += 16) store(x + i, rms_apply<Act>(load(h + i), r, load(weight + i)));
  if (hidden) std::memcpy(hidden, h, uint64_t(a.H) * 4);
}

// h[t] += y[t]. step, y f32[T,H], h f32[T,H]. grid: T
template <class Act> static void residual_rows(const KernelCall& c, uint32_t begin, uint32_t end) {
  const auto& a = args<LilyNormArgs>(c);
  const auto& step = *buffer<LilyStep>(c, 0);
  for (uint32_t t = begin; t < end && t < step.rows; t++) {
    const float* y = buffer<float>(c, 1) + uint64_t(t) * a.H;
    float* h = buffer<float>(c, 2) + uint64_t(t) * a.H;
    for (uint32_t i = 0; i < a.H; i += 16) store(h + i, add(load(h + i), load(y + i)));
  }
}

// residual_rows, then rmsnorm_rows of what it leaves: step, y f32[T,H], h f32[T,H], weight f32[H] -> x act[T,H]. grid: T
template <class Act> static void residual_norm_rows(const KernelCall& c, uint32_t begin, uint32_t end) {
  const auto& a = args<LilyNormArgs>(c);
  const auto& step = *buffer<LilyStep>(c, 0);
  const float* weight = buffer<float>(c, 3);
  for (uint32_t t = begin; t < end && t < step.rows; t++) {
    const float* y = buffer<float>(c, 1) + uint64_t(t) * a.H;
    float* h = buffer<float>(c, 2) + uint64_t(t) * a.H;
    Act* x = buffer<Act>(c, 4) + uint64_t(t) * a.H;
    float total = 0;
    for (uint32_t i = 0; i < a.H; i += 16) {
      store(h + i, add(load(h + i), load(y + i)));
      total = i ? total + ssq_block(h + i) : ssq_block(h);
    }
    const float r = rms_from_total(total, a.H, a.eps);
    for (uint32_t i = 0; i < a.H; i += 16) store(x + i, rms_apply<Act>(load(h + i), r, load(weight + i)));
  }
}

// h += y, then the partial sums of squares of h. y f32[H], h f32[H], ssq f32[H/16]. grid: 1
template <class Act> static void residual_step(const KernelCall& c, uint32_t begin, uint32_t end) {
  const auto& a = args<LilyNormArgs>(c);
  const float* y = buffer<float>(c, 0);
  float *h = buffer<float>(c, 1), *ssq = buffer<float>(c, 2);
  if (begin >= end) return;
  for (uint32_t i = 0; i < a.H / 16; i++) {
    store(h + 16 * i, add(load(h + 16 * i), load(y + 16 * i)));
    ssq[i] = ssq_block(h + 16 * i);
  }
}

// Copies rows of h f32[T,H]: the last live one to hidden, snapshot rows to their buffers (absent: none), all of them when copy_all. grid: T
template <class Act> static void take_rows(const KernelCall& c, uint32_t begin, uint32_t end) {
  const auto& a = args<LilyNormArgs>(c);
  const auto& step = *buffer<LilyStep>(c, 0);
  uint64_t bytes = uint64_t(a.H) * 4;
  for (uint32_t t = begin; t < end && t < step.rows; t++) {
    const float* row = buffer<float>(c, 1) + uint64_t(t) * a.H;
    if (t + 1 == step.rows && c.buffers[2]) std::memcpy(c.buffers[2], row, bytes);
    for (uint32_t i = 0; i < step.n_snapshots && i < LILY_MAX_SNAPSHOTS; i++)
      if (step.snapshot_rows[i] == t && c.buffers[3 + i]) std::memcpy(c.buffers[3 + i], row, bytes);
    if (a.copy_all) std::memcpy(buffer<float>(c, 11) + uint64_t(t) * a.H, row, bytes);
  }
}

}  // namespace lily::cpu::LILY_CPU_NS

LILY_KERNELS(norm, {"rmsnorm_rows", rmsnorm_rows<Bf16>, rmsnorm_rows<F32>}, {"norm_final", norm_final<Bf16>, norm_final<F32>},
             {"residual_rows", residual_rows<Bf16>, residual_rows<F32>}, {"residual_norm_rows", residual_norm_rows<Bf16>, residual_norm_rows<F32>},
             {"residual_step", residual_step<Bf16>, residual_step<F32>},
             {"take_rows", take_rows<Bf16>, take_rows<F32>})
