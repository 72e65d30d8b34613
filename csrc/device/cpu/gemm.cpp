// Matrix products of prefill, a chunk of T rows at once. A threadgroup is 64 outputs for all rows; order of sums and tiles in gemm_tile.hpp.
// Bytes moved: the weight once per 512 rows, x once per threadgroup. Rows past step->rows are neither read nor written.
#include "device/cpu/gemm_tile.hpp"
#include "device/cpu/kernel.hpp"

namespace lily::cpu::LILY_CPU_NS {

constexpr uint32_t kPassRows = 512;  // rows whose sums are kept between blocks of K: 128 KiB

// step, x act[T,K], y f32[T,ldy], W [N,K]; y[t][out + n] = x_t . W_n, rounded when args.round. grid: N/64
template <class Act> static void gemm(const KernelCall& c, uint32_t begin, uint32_t end) {
  const auto& a = args<LilyGemmArgs>(c);
  const uint32_t T = buffer<LilyStep>(c, 0)->rows;
  const RowSource<Act> x{buffer<const Act>(c, 1), nullptr, a.K};
  const Weight w = make_weight(a.fmt, a.K, c.buffers + 3);
  alignas(64) float acc[kPassRows * kTileN];
  for (uint32_t g = begin; g < end; g++) {
    const uint32_t first = g * kTileN, n = smaller(kTileN, a.N - first);
    for (uint32_t t0 = 0; t0 < T; t0 += kPassRows) {
      const uint32_t rows = smaller(kPassRows, T - t0);
      tile_product(w, first, n, x, t0, rows, acc);
      for (uint32_t i = 0; i < rows; i++) {
        float* y = buffer<float>(c, 2) + uint64_t(t0 + i) * a.ldy + a.out + first;
        for (uint32_t j = 0; j < n; j += 16) {
          V v = load(acc + i * kTileN + j);
          store_n(y + j, a.round ? round_act<Act>(v) : v, n - j);
        }
      }
    }
  }
}

// step, x act[T,K], h f32[T,N], W [N,K]; h += x W^T. grid: N/64
template <class Act> static void gemm_residual(const KernelCall& c, uint32_t begin, uint32_t end) {
  const auto& a = args<LilyGemmArgs>(c);
  const uint32_t T = buffer<LilyStep>(c, 0)->rows;
  const RowSource<Act> x{buffer<const Act>(c, 1), nullptr, a.K};
  const Weight w = make_weight(a.fmt, a.K, c.buffers + 3);
  alignas(64) float acc[kPassRows * kTileN];
  for (uint32_t g = begin; g < end; g++) {
    const uint32_t first = g * kTileN, n = smaller(kTileN, a.N - first);
    for (uint32_t t0 = 0; t0 < T; t0 += kPassRows) {
      const uint32_t rows = smaller(kPassRows, T - t0);
      tile_product(w, first, n, x, t0, rows, acc);
      for (uint32_t i = 0; i < rows; i++) {
        float* h = buffer<float>(c, 2) + uint64_t(t0 + i) * a.N + first;
        for (uint32_t j = 0; j < n; j += 16) store_n(h + j, add(load_n(h + j, n - j), load(acc + i * kTileN + j)), n - j);
      }
    }
  }
}

// step, x act[T,K], a act[T,N], gate [N,K], up [N,K]; a = round(silu(x G^T) * (x U^T)). grid: N/64
template <class Act> static void gate_up_rows(const KernelCall& c, uint32_t begin, uint32_t end) {
  const auto& a = args<LilyGemmArgs>(c);
  const uint32_t T = buffer<LilyStep>(c, 0)->rows;
  const RowSource<Act> x{buffer<const Act>(c, 1), nullptr, a.K};
  const Weight gate = make_weight(a.fmt, a.K, c.buffers + 3), up = make_weight(a.up, a.K, c.buffers + 6);
  constexpr uint32_t kPass = kPassRows / 2;
  alignas(64) float g_acc[kPass * kTileN], u_acc[kPass * kTileN];
  for (uint32_t g = begin; g < end; g++) {
    const uint32_t first = g * kTileN, n = smaller(kTileN, a.N - first);
    for (uint32_t t0 = 0; t0 < T; t0 += kPass) {
      const uint32_t rows = smaller(kPass, T - t0);
      tile_product(gate, first, n, x, t0, rows, g_acc);
      tile_product(up, first, n, x, t0, rows, u_acc);
      for (uint32_t i = 0; i < rows; i++) swiglu(g_acc + i * kTileN, u_acc + i * kTileN, n, buffer<Act>(c, 2) + uint64_t(t0 + i) * a.N + first);
    }
  }
}

// step, gate f32[T*m,N], up f32[T*m,N], a act[T*m,N], m = rows_per_token; a = round(silu(gate) * up). grid: T
template <class Act> static void swiglu_rows(const KernelCall& c, uint32_t begin, uint32_t end) {
  const auto& a = args<LilyGemmArgs>(c);
  const uint32_t T = buffer<LilyStep>(c, 0)->rows;
  const uint64_t width = uint64_t(a.N) * a.rows_per_token;
  for (uint32_t t = begin; t < end && t < T; t++)
    swiglu(buffer<float>(c, 1) + t * width, buffer<float>(c, 2) + t * width, uint32_t(width), buffer<Act>(c, 3) + t * width);
}

}  // namespace lily::cpu::LILY_CPU_NS

LILY_KERNELS(gemm, {"gemm", gemm<Bf16>, gemm<F32>}, {"gemm_residual", gemm_residual<Bf16>, gemm_residual<F32>},
             {"gate_up_rows", gate_up_rows<Bf16>, gate_up_rows<F32>}, {"swiglu_rows", swiglu_rows<Bf16>, swiglu_rows<F32>})
