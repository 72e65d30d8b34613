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

// The same order in three kernels, as GPUs make it: blocks of 64 rows, so that no threadgroup orders more. A row's experts are distinct.
constexpr uint32_t kRouteRows = 64;
static uint32_t route_blocks(uint32_t rows) { return (rows + kRouteRows - 1) / kRouteRows; }
static uint32_t ceil_div(uint32_t a, uint32_t b) { return (a + b - 1) / b; }

// step, ids u32[T,k] -> counts u32[B,E]. grid: B; blocks without a live row are not touched.
template <class Act> static void moe_histogram(const KernelCall& c, uint32_t begin, uint32_t end) {
  const auto& a = args<LilyRouteArgs>(c);
  const uint32_t rows = buffer<LilyStep>(c, 0)->rows;
  for (uint32_t b = begin; b < end && b < route_blocks(rows); b++) {
    const uint32_t first = b * kRouteRows, last = first + kRouteRows < rows ? first + kRouteRows : rows;
    uint32_t* counts = buffer<uint32_t>(c, 2) + uint64_t(b) * a.E;
    for (uint32_t e = 0; e < a.E; e++) counts[e] = 0;
    for (uint64_t i = uint64_t(first) * a.k; i < uint64_t(last) * a.k; i++) counts[buffer<uint32_t>(c, 1)[i]]++;
  }
}

// step, counts u32[B,E] -> offsets u32[E+1], base u32[B,E], tiles u32[max_tiles,4], grids u32[2,3]. grid: 1
template <class Act> static void moe_scan(const KernelCall& c, uint32_t begin, uint32_t end) {
  if (begin >= end) return;
  const auto& a = args<LilyRouteArgs>(c);
  const uint32_t B = route_blocks(buffer<LilyStep>(c, 0)->rows);
  const uint32_t* counts = buffer<uint32_t>(c, 1);
  uint32_t *offsets = buffer<uint32_t>(c, 2), *base = buffer<uint32_t>(c, 3), *tiles = buffer<uint32_t>(c, 4), *grids = buffer<uint32_t>(c, 5);
  uint32_t slot = 0, n_tiles = 0;
  for (uint32_t e = 0; e < a.E; e++) {
    offsets[e] = slot;
    for (uint32_t b = 0; b < B; b++) {
      base[uint64_t(b) * a.E + e] = slot;
      slot += counts[uint64_t(b) * a.E + e];
    }
    for (uint32_t s = offsets[e]; s < slot; s += a.tile_rows) {
      const uint32_t tile[4] = {e, s, slot - s < a.tile_rows ? slot - s : a.tile_rows, 0};
      for (uint32_t i = 0; i < 4; i++) tiles[4 * n_tiles + i] = tile[i];
      n_tiles++;
    }
  }
  offsets[a.E] = slot;
  const uint32_t grid[6] = {ceil_div(a.N_a, 64), n_tiles, 1, ceil_div(a.N_b, 64), n_tiles, 1};
  for (uint32_t i = 0; i < 6; i++) grids[i] = grid[i];
}

// step, ids u32[T,k], base u32[B,E] -> slot_row u32[T*k], slot_of u32[T,k]. grid: B
template <class Act> static void moe_scatter(const KernelCall& c, uint32_t begin, uint32_t end) {
  const auto& a = args<LilyRouteArgs>(c);
  const uint32_t rows = buffer<LilyStep>(c, 0)->rows;
  const uint32_t* ids = buffer<uint32_t>(c, 1);
  uint32_t *slot_row = buffer<uint32_t>(c, 3), *slot_of = buffer<uint32_t>(c, 4);
  for (uint32_t b = begin; b < end && b < route_blocks(rows); b++) {
    const uint32_t first = b * kRouteRows, last = first + kRouteRows < rows ? first + kRouteRows : rows;
    const uint32_t* base = buffer<uint32_t>(c, 2) + uint64_t(b) * a.E;
    for (uint64_t i = uint64_t(first) * a.k; i < uint64_t(last) * a.k; i++) {
      uint32_t slot = base[ids[i]];
      for (uint64_t j = uint64_t(first) * a.k; j < i; j++) slot += ids[j] == ids[i];
      slot_row[slot] = uint32_t(i / a.k);
      slot_of[i] = slot;
    }
  }
}

}  // namespace lily::cpu::LILY_CPU_NS

LILY_KERNELS(moe_route, {"moe_topk_rows", moe_topk_rows<Bf16>, moe_topk_rows<F32>}, {"moe_group", moe_group<Bf16>, moe_group<F32>},
             {"moe_histogram", moe_histogram<Bf16>, moe_histogram<F32>}, {"moe_scan", moe_scan<Bf16>, moe_scan<F32>},
             {"moe_scatter", moe_scatter<Bf16>, moe_scatter<F32>})
