// Routing of a chunk: top-k per row, then the slots (row, choice) sorted by expert. All counts are 32 bits: 8,200 rows x 10 choices pass 16.
#include "device/cpu/kernel.hpp"
#include "device/cpu/route.hpp"

namespace lily::cpu::LILY_CPU_NS {

// step, logits f32[T,E], ids u32[T,k], route f32[T,k]. grid: T. Order and arithmetic in route.hpp.
template <class Act> static void moe_topk_rows(const KernelCall& c, uint32_t begin, uint32_t end) {
  const auto& a = args<LilyMoeRowsArgs>(c);
  const uint32_t rows = buffer<LilyStep>(c, 0)->rows;
  for (uint32_t t = begin; t < end && t < rows; t++)
    route_token(buffer<float>(c, 1) + uint64_t(t) * a.E, a.E, a.k, buffer<uint32_t>(c, 2) + uint64_t(t) * a.k, buffer<float>(c, 3) + uint64_t(t) * a.k);
}

// step, ids u32[T,k], offsets u32[E+1], slot_row u32[T*k], slot_of u32[T,k]. grid: 1
// Histogram, prefix sum, scatter; slots of an expert in order of row. slot_of[t,j] is the sorted slot of choice j of row t.
template <class Act> static void moe_group(const KernelCall& c, uint32_t begin, uint32_t end) {
  if (begin >= end) return;
  const auto& a = args<LilyMoeRowsArgs>(c);
  const uint32_t n = buffer<LilyStep>(c, 0)->rows * a.k;
  const uint32_t* ids = buffer<uint32_t>(c, 1);
  uint32_t *offsets = buffer<uint32_t>(c, 2), *slot_row = buffer<uint32_t>(c, 3), *slot_of = buffer<uint32_t>(c, 4);
  for (uint32_t e = 0; e <= a.E; e++) offsets[e] = 0;
  for (uint32_t i = 0; i < n; i++) offsets[ids[i]]++;
  uint32_t total = 0;
  for (uint32_t e = 0; e <= a.E; e++) {  // offsets[e] becomes the first slot of expert e
    uint32_t count = offsets[e];
    offsets[e] = total;
    total += count;
  }
  for (uint32_t i = 0; i < n; i++) {
    uint32_t slot = offsets[ids[i]]++;
    slot_row[slot] = i / a.k;
    slot_of[i] = slot;
  }
  for (uint32_t e = a.E; e; e--) offsets[e] = offsets[e - 1];  // the scatter left each expert's end
  offsets[0] = 0;
}

}  // namespace lily::cpu::LILY_CPU_NS

LILY_KERNELS(moe_route, {"moe_topk_rows", moe_topk_rows<Bf16>, moe_topk_rows<F32>}, {"moe_group", moe_group<Bf16>, moe_group<F32>})
