// Launches of the prefill kernels that work row by row: routing, DeltaNet, what stands around attention and the products.
#include <algorithm>

#include "args.h"
#include "base/error.hpp"
#include "device/shader/launch.hpp"

namespace lily {
namespace {

constexpr uint32_t kRowThreads = 256;

uint32_t ceil_div(uint32_t a, uint32_t b) { return (a + b - 1) / b; }

[[noreturn]] void unfit(const Dispatch& d, const std::string& what) { throw DeviceError("kernel '" + d.kernel + "' has no Metal form for " + what); }

Launch launch(std::string function, std::array<uint32_t, 3> grid, uint32_t threads, std::string reason = "") {
  Launch l;
  l.function = std::move(function);
  l.grid = grid;
  l.threads = threads;
  l.reason = std::move(reason);
  return l;
}

// A threadgroup a row.
Launch per_row(const Dispatch& d, const std::string*) {
  return launch(d.kernel, {d.rows, 1, 1}, kRowThreads);
}

// The kernel's instance for a head dim: gdn_scan_128 holds four elements of Dk a lane.
std::string for_head_dim(const Dispatch& d) {
  const uint32_t Dk = args_of<LilyGdnArgs>(d).Dk;
  if (Dk > 256 || Dk % 16) unfit(d, "a key head dim of " + std::to_string(Dk) + ", expected a multiple of 16 up to 256");
  for (uint32_t size : {32u, 64u, 128u})
    if (Dk <= size) return d.kernel + "_" + std::to_string(size);
  return d.kernel + "_256";
}

Launch conv_rows(const Dispatch& d, const std::string*) {
  const auto& a = args_of<LilyGdnArgs>(d);
  return launch(d.kernel, {ceil_div(2 * a.Nk * a.Dk + a.Nv * a.Dv, 128), ceil_div(d.rows, 16), 1}, 128);
}

Launch gdn_prepare_rows(const Dispatch& d, const std::string*) { return launch(for_head_dim(d), {d.rows, 1, 1}, kRowThreads); }

Launch gdn_scan(const Dispatch& d, const std::string* variant) {
  const auto& a = args_of<LilyGdnArgs>(d);
  if (a.Dv % 4) unfit(d, "a value head dim of " + std::to_string(a.Dv) + ", expected a multiple of 4");
  if (variant && *variant == "chunked") {
    if (a.Dv % 8) unfit(d, "a value head dim of " + std::to_string(a.Dv) + " in the chunkwise form, expected a multiple of 8");
    Launch l = launch(for_head_dim(d), {ceil_div(a.Dv, 32), a.Nv, 1}, 256, "the chunkwise form in blocks of 64 rows");
    l.function.insert(d.kernel.size(), "_chunked");  // gdn_scan_chunked_128
    return l;
  }
  const bool blocks = variant && *variant == "blocks";
  Launch l = launch(for_head_dim(d), {ceil_div(a.Dv, 32), a.Nv, 1}, 256,
                    blocks ? "the state through memory every 32 rows" : "the state in registers from the first row to the last");
  l.constants = {0, 0, blocks};
  return l;
}

Launch attention_rows(const Dispatch& d, const std::string*) {
  const auto& a = args_of<LilyAttnArgs>(d);
  if (a.R > 256 || a.R % 2) unfit(d, std::to_string(a.R) + " rotary dims, expected an even number up to 256");
  return per_row(d, nullptr);
}

Launch moe_topk_rows(const Dispatch& d, const std::string*) {
  const auto& a = args_of<LilyMoeRowsArgs>(d);
  if (a.E > kMaxExperts || a.k > 32) unfit(d, std::to_string(a.k) + " of " + std::to_string(a.E) + " experts, expected at most 32 of 512");
  return launch(d.kernel, {ceil_div(d.rows, 4), 1, 1}, 128);
}

// The three kernels of the tile map: a threadgroup a block of 64 rows, one for the scan between them.
Launch route_blocks(const Dispatch& d, const std::string*) {
  const auto& a = args_of<LilyRouteArgs>(d);
  if (a.E > kMaxExperts) unfit(d, std::to_string(a.E) + " experts, expected at most 512");
  return launch(d.kernel, {ceil_div(d.rows, 64), 1, 1}, kRowThreads);
}
Launch moe_scan(const Dispatch& d, const std::string*) {
  Launch l = route_blocks(d, nullptr);
  l.grid = {1, 1, 1};
  l.threads = std::max(32u, ceil_div(args_of<LilyRouteArgs>(d).E, 32) * 32);
  l.reason = "tiles of " + std::to_string(args_of<LilyRouteArgs>(d).tile_rows) + " rows";
  return l;
}

// Four neighbouring values a thread.
Launch per_four(const Dispatch& d, uint64_t width) {
  if (width % 4) unfit(d, "rows of " + std::to_string(width) + " values, expected a multiple of 4");
  return launch(d.kernel, {uint32_t((width + 4 * kRowThreads - 1) / (4 * kRowThreads)), d.rows, 1}, kRowThreads);
}
Launch swiglu_rows(const Dispatch& d, const std::string*) {
  const auto& a = args_of<LilyGemmArgs>(d);
  return per_four(d, uint64_t(a.N) * a.rows_per_token);
}
Launch moe_combine_rows(const Dispatch& d, const std::string*) { return per_four(d, args_of<LilyMoeRowsArgs>(d).H); }

}  // namespace

const std::vector<LaunchEntry>& prefill_small_launches() {
  static const std::vector<LaunchEntry> entries{
      {"conv_rows", conv_rows, {}},
      {"gdn_prepare_rows", gdn_prepare_rows, {}},
      {"gdn_scan", gdn_scan, {"registers", "blocks", "chunked"}},
      {"gated_norm_rows", per_row, {}},
      {"swiglu_rows", swiglu_rows, {}},
      {"attn_prepare_rows", attention_rows, {}},
      {"head_norm_rows", per_row, {}},
      {"rope_rows", attention_rows, {}},
      {"kv_write_rows", attention_rows, {}},
      {"gate_rows", per_row, {}},
      {"moe_topk_rows", moe_topk_rows, {}},
      {"moe_histogram", route_blocks, {}},
      {"moe_scan", moe_scan, {"tile16", "tile32"}},
      {"moe_scatter", route_blocks, {}},
      {"moe_combine_rows", moe_combine_rows, {}},
  };
  return entries;
}

}  // namespace lily
