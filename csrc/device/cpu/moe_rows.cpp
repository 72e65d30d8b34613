// Mixture of experts in prefill: the slots of moe_group, expert by expert, so that an expert's weights are dequantised once for all its rows.
// Order of sums and tiles in gemm_tile.hpp; a slot's bits do not depend on how many rows its expert got.
#include "device/cpu/kernel.hpp"
#include "device/cpu/products.hpp"
#include "device/cpu/stream.hpp"

namespace lily::cpu::LILY_CPU_NS {

// offsets u32[E+1], slot_row u32[T*k], x act[T,K] (row slot_row[s]) or act[T*k,K] (by_slot), y f32[T*k,N], W stack [E,N,K]; y_s = W_e x_s.
// Threadgroup g: expert g / ceil(N/64), outputs from 64 * (g % ceil(N/64)); an expert without slots returns at once.
template <class Act> static void moe_gemm_rows(const KernelCall& c, uint32_t begin, uint32_t end) {
  const auto& a = args<LilyMoeRowsArgs>(c);
  const uint32_t* offsets = buffer<uint32_t>(c, 0);
  const RowSource<Act> x{buffer<const Act>(c, 2), a.by_slot ? nullptr : buffer<uint32_t>(c, 1), a.K};
  const Weight w = make_weight(a.a, a.K, c.buffers + 4);
  const Stream stream(buffer<float>(c, 3), a.N, offsets[a.E]);
  for_ranges(c, begin, end, [&](uint32_t begin, uint32_t end) {
    for_each_block(begin, end, a.N, [&](uint32_t e, uint32_t first, uint32_t last) {
      const Product<Act, 1> p{x, offsets[e], offsets[e + 1], first, last, a.N, {{&w, uint64_t(e) * a.a_stride}}};
      products(p, [&](uint32_t tile, uint32_t s, uint32_t rows, const float* acc) {
        const uint32_t n = smaller(kTileN, a.N - tile * kTileN);
        for (uint32_t r = 0; r < rows; r++) {
          const float* sums = acc + r * kTileN;
          float* y = buffer<float>(c, 3) + uint64_t(s + r) * a.N + tile * kTileN;
          for (uint32_t j = 0; j < n; j += 16) n - j >= 16 ? stream.write(y + j, load(sums + j)) : store_n(y + j, load(sums + j), n - j);
        }
      });
    });
  });
}

// offsets, slot_row, x act[T,K], a act[T*k,N], gate and up stacks [E,N,K]; a_s = round(silu(G_e x_s) * (U_e x_s)). Threadgroups as above.
template <class Act> static void moe_gate_up_rows(const KernelCall& c, uint32_t begin, uint32_t end) {
  const auto& a = args<LilyMoeRowsArgs>(c);
  const uint32_t* offsets = buffer<uint32_t>(c, 0);
  const RowSource<Act> x{buffer<const Act>(c, 2), buffer<uint32_t>(c, 1), a.K};
  const Weight gate = make_weight(a.a, a.K, c.buffers + 4), up = make_weight(a.b, a.K, c.buffers + 7);
  for_ranges(c, begin, end, [&](uint32_t begin, uint32_t end) {
    for_each_block(begin, end, a.N, [&](uint32_t e, uint32_t first, uint32_t last) {
      const Product<Act, 2> p{x, offsets[e], offsets[e + 1], first, last, a.N, {{&gate, uint64_t(e) * a.a_stride}, {&up, uint64_t(e) * a.b_stride}}};
      pair_products(p, buffer<Act>(c, 3));
    });
  });
}

// step, slot_of u32[T,k] (absent: y is in the order of route), route f32[T,k], y f32[T*k,H], shared f32[T,H], shared_logit f32[T], h f32[T,H].
// h += (sum over j of route_j * y[slot_of_j], j ascending) + sigmoid(shared_logit) * shared. grid: T
template <class Act> static void moe_combine_rows(const KernelCall& c, uint32_t begin, uint32_t end) {
  const auto& a = args<LilyMoeRowsArgs>(c);
  const uint32_t T = buffer<LilyStep>(c, 0)->rows;
  const float* y = buffer<float>(c, 3);
  for (uint32_t t = begin; t < end && t < T; t++) {
    const uint32_t* slot_of = buffer<uint32_t>(c, 1);  // absent: slots are in the order of rows and choices
    const float* route = buffer<float>(c, 2) + uint64_t(t) * a.k;
    const float* shared = buffer<float>(c, 4) + uint64_t(t) * a.H;
    const V gate = splat(sigmoid1(buffer<float>(c, 5)[t]));
    float* h = buffer<float>(c, 6) + uint64_t(t) * a.H;
    for (uint32_t i = 0; i < a.H; i += 16) {
      const uint32_t n = a.H - i;
      V sum = zero();
      for (uint32_t j = 0; j < a.k; j++) {
        const uint64_t choice = uint64_t(t) * a.k + j, slot = slot_of ? slot_of[choice] : choice;
        sum = fma(splat(route[j]), load_n(y + slot * a.H + i, n), sum);
      }
      sum = fma(gate, load_n(shared + i, n), sum);
      store_n(h + i, add(load_n(h + i, n), sum), n);
    }
  }
}

}  // namespace lily::cpu::LILY_CPU_NS

LILY_KERNELS(moe_rows, {"moe_gemm_rows", moe_gemm_rows<Bf16>, moe_gemm_rows<F32>}, {"moe_gate_up_rows", moe_gate_up_rows<Bf16>, moe_gate_up_rows<F32>}
#if !defined(LILY_AMX)
             , {"moe_combine_rows", moe_combine_rows<Bf16>, moe_combine_rows<F32>}
#endif
)
