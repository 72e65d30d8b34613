// Matrix products of prefill, a chunk of T rows at once. A threadgroup is 64 outputs for 256 rows; order of sums and tiles in gemm_tile.hpp.
// Threadgroups follow each other output by output, so that a thread packs the rows once for all the outputs of its range.
// Bytes moved: the weight once per 256 rows, x once per four tiles. Rows past step->rows are neither read nor written.
#include "device/cpu/kernel.hpp"
#include "device/cpu/products.hpp"
#include "device/cpu/stream.hpp"

namespace lily::cpu::LILY_CPU_NS {

static_assert(LILY_GEMM_ROWS == kPassRows);

// Calls compute(first row, last row, first tile, last tile) for the rows that exist among threadgroups [begin, end). Where fewer rows than a threadgroup's
// go together, the threadgroups of its rows first take all outputs for the first of them, then for the next.
template <class Act, class Compute> LILY_INLINE void for_row_blocks(const KernelCall& c, uint32_t K, uint32_t N, uint32_t begin, uint32_t end, Compute compute) {
  const uint32_t T = buffer<LilyStep>(c, 0)->rows, size = rows_together<Act>(K), parts = LILY_GEMM_ROWS / size;
  for_ranges(c, begin, end, [&](uint32_t begin, uint32_t end) {
    for_each_block(begin * parts, end * parts, N, [&](uint32_t block, uint32_t tile, uint32_t tiles) {
      const uint32_t first = block * size;
      if (first < T) compute(first, smaller(T, first + size), tile, tiles);
    });
  });
}

// Calls done(t, n0, n, sums) for each row t and tile of outputs n0..n0+n that threadgroups [begin, end) cover.
template <class Act, class Done>
LILY_INLINE void for_tiles(const KernelCall& c, const LilyGemmArgs& a, uint32_t begin, uint32_t end, Done done) {
  const Weight w = make_weight(a.fmt, a.K, c.buffers + 3);
  for_row_blocks<Act>(c, a.K, a.N, begin, end, [&](uint32_t first, uint32_t last, uint32_t from, uint32_t to) {
    const Product<Act, 1> p{{buffer<const Act>(c, 1), nullptr, a.K}, first, last, from, to, a.N, {{&w, 0}}};
    products(p, [&](uint32_t tile, uint32_t t, uint32_t rows, const float* acc) {
      for (uint32_t r = 0; r < rows; r++) done(t + r, tile * kTileN, smaller(kTileN, a.N - tile * kTileN), acc + r * kTileN);
    });
  });
}

// step, x act[T,K], y f32[T,ldy], W [N,K]; y[t][out + n] = x_t . W_n, rounded when args.round. grid: T/256 x N/64
template <class Act> static void gemm(const KernelCall& c, uint32_t begin, uint32_t end) {
  const auto& a = args<LilyGemmArgs>(c);
  const Stream stream(buffer<float>(c, 2) + a.out, a.ldy, buffer<LilyStep>(c, 0)->rows);
  for_tiles<Act>(c, a, begin, end, [&](uint32_t t, uint32_t n0, uint32_t n, const float* sums) {
    float* y = buffer<float>(c, 2) + uint64_t(t) * a.ldy + a.out + n0;
    for (uint32_t j = 0; j < n; j += 16) {
      const V v = a.round ? round_act<Act>(load(sums + j)) : load(sums + j);
      n - j >= 16 ? stream.write(y + j, v) : store_n(y + j, v, n - j);
    }
  });
}

// step, x act[T,K], h f32[T,N], W [N,K]; h += x W^T. grid: T/256 x N/64
template <class Act> static void gemm_residual(const KernelCall& c, uint32_t begin, uint32_t end) {
  const auto& a = args<LilyGemmArgs>(c);
  for_tiles<Act>(c, a, begin, end, [&](uint32_t t, uint32_t n0, uint32_t n, const float* sums) {
    float* h = buffer<float>(c, 2) + uint64_t(t) * a.N + n0;
    for (uint32_t j = 0; j < n; j += 16) store_n(h + j, add(load_n(h + j, n - j), load(sums + j)), n - j);
  });
}

// step, x act[T,K], a act[T,N], gate [N,K], up [N,K]; a = round(silu(x G^T) * (x U^T)). grid: T/256 x N/64
template <class Act> static void gate_up_rows(const KernelCall& c, uint32_t begin, uint32_t end) {
  const auto& a = args<LilyGemmArgs>(c);
  const Weight gate = make_weight(a.fmt, a.K, c.buffers + 3), up = make_weight(a.up, a.K, c.buffers + 6);
  for_row_blocks<Act>(c, a.K, a.N, begin, end, [&](uint32_t first, uint32_t last, uint32_t from, uint32_t to) {
    const Product<Act, 2> p{{buffer<const Act>(c, 1), nullptr, a.K}, first, last, from, to, a.N, {{&gate, 0}, {&up, 0}}};
    pair_products(p, buffer<Act>(c, 2));
  });
}

// step, gate f32[T*m,N], up f32[T*m,N], a act[T*m,N], m = rows_per_token; a = round(silu(gate) * up). grid: T
template <class Act> static void swiglu_rows(const KernelCall& c, uint32_t begin, uint32_t end) {
  const auto& a = args<LilyGemmArgs>(c);
  const uint32_t T = buffer<LilyStep>(c, 0)->rows;
  const uint64_t width = uint64_t(a.N) * a.rows_per_token;
  for (uint32_t t = begin; t < end && t < T; t++) swiglu(buffer<float>(c, 1) + t * width, buffer<float>(c, 2) + t * width, uint32_t(width), buffer<Act>(c, 3) + t * width);
}

}  // namespace lily::cpu::LILY_CPU_NS

LILY_KERNELS(gemm, {"gemm", gemm<Bf16>, gemm<F32>}, {"gemm_residual", gemm_residual<Bf16>, gemm_residual<F32>}, {"gate_up_rows", gate_up_rows<Bf16>, gate_up_rows<F32>}
#if !defined(LILY_AMX)
             , {"swiglu_rows", swiglu_rows<Bf16>, swiglu_rows<F32>}
#endif
)
