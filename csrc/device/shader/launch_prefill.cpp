// Launches of the matrix products and of attention in prefill.
#include <algorithm>

#include "args.h"
#include "base/error.hpp"
#include "device/shader/launch.hpp"

namespace lily {
namespace {

constexpr uint32_t kOutputs = 64;  // of a tile; a pair of weights takes 32 each

uint32_t stored_bits(uint32_t format) { return format == 17 ? 16 : format; }
uint32_t chunk_of(uint32_t format) { return format <= 4 ? 256 : format <= 8 ? 128 : format == 32 ? 32 : 64; }
uint32_t up(uint64_t n, uint32_t size) { return uint32_t((n + size - 1) / size); }

// Tile, staging buffer and formats of a product of x with one weight, or with two of which it takes 32 outputs each.
Launch product(const std::string& kernel, const std::string* variant, uint32_t tile_rows, uint32_t K, uint32_t format, uint32_t second, bool pair) {
  Launch l;
  const uint32_t chunk = pair ? std::min(chunk_of(format), chunk_of(second)) : chunk_of(format);
  bool wide = true;
  for (uint32_t f : {format, pair ? second : format}) wide = wide && K * stored_bits(f) / 8 % 16 == 0 && chunk * stored_bits(f) / 32 % 4 == 0;
  l.function = kernel + (variant && variant->starts_with("tensor") ? "_tensor" : "") + (tile_rows == 16 ? "_m16" : "_m32");
  l.constants = {format, second, 0, wide};
  l.threads = 128;
  return l;
}

uint32_t tile_of(const Dispatch& d, const std::string* variant, std::string& reason) {
  reason = variant ? "forced by LILY_KERNEL" : d.rows > 16 ? "tile of 32 rows" : "tile of 16 rows: no more in the chunk";
  if (variant && (*variant == "tile16" || *variant == "tensor16")) return 16;
  if (variant && (*variant == "tile32" || *variant == "tensor32")) return 32;
  return d.rows > 16 ? 32 : 16;
}

Launch dense(const Dispatch& d, const std::string* variant) {
  const auto& a = args_of<LilyGemmArgs>(d);
  std::string reason;
  const uint32_t rows = tile_of(d, variant, reason), format = format_constant(a.fmt);
  Launch l = product(d.kernel, variant, rows, a.K, format, format, false);
  l.grid = {up(d.rows, rows), up(a.N, kOutputs), 1};
  l.reason = reason;
  return l;
}

Launch dense_pair(const Dispatch& d, const std::string* variant) {
  const auto& a = args_of<LilyGemmArgs>(d);
  std::string reason;
  const uint32_t rows = tile_of(d, variant, reason);
  Launch l = product(d.kernel, variant, rows, a.K, format_constant(a.fmt), format_constant(a.up), true);
  l.grid = {up(d.rows, rows), up(a.N, kOutputs / 2), 1};
  l.reason = reason;
  return l;
}

Launch routed(const Dispatch& d, const std::string* variant, bool pair) {
  const auto& a = args_of<LilyMoeRowsArgs>(d);
  if (d.indirect < 0) throw DeviceError(d.kernel + " needs a tile map on this device");
  const uint32_t format = format_constant(a.a);
  Launch l = product(d.kernel, variant, a.tile_rows, a.K, format, pair ? format_constant(a.b) : format, pair);
  l.reason = "tiles of " + std::to_string(a.tile_rows) + " rows, as the map has them";
  return l;
}
Launch routed_one(const Dispatch& d, const std::string* variant) { return routed(d, variant, false); }
Launch routed_pair(const Dispatch& d, const std::string* variant) { return routed(d, variant, true); }

// expand_rows writes the matrix that the products never hold: for the comparison alone.
Launch expand(const Dispatch& d, const std::string*) {
  Launch l;
  l.function = "expand_rows";
  l.constants = {format_constant(args_of<LilyGemmArgs>(d).fmt)};
  l.grid = {d.groups, 1, 1};
  l.threads = 128;
  l.reason = "forced by LILY_KERNEL";
  return l;
}

Launch attention(const Dispatch& d, const std::string*) {
  const auto& a = args_of<LilyAttnArgs>(d);
  if (a.D != 64 && a.D != 128 && a.D != 256) throw DeviceError("attn_rows has head dim " + std::to_string(a.D) + ", expected 64, 128 or 256 on this device");
  Launch l;
  l.function = "attn_rows_d" + std::to_string(a.D);
  l.grid = {up(uint64_t(d.rows) * (a.Hq / a.Hkv), 32), a.Hkv, 1};
  l.threads = 256;
  l.reason = "tiles of 32 (row, head) pairs";
  return l;
}

}  // namespace

const std::vector<LaunchEntry>& prefill_launches() {
  static const std::vector<LaunchEntry> entries{
      {"gemm", dense, {"tile16", "tile32", "simdgroup", "tensor", "tensor16", "tensor32", "expand"}},
      {"gemm_residual", dense, {"tile16", "tile32", "simdgroup", "tensor", "tensor16", "tensor32"}},
      {"gate_up_rows", dense_pair, {"tile16", "tile32", "simdgroup", "tensor", "tensor16", "tensor32"}},
      {"moe_gemm_rows", routed_one, {"simdgroup", "tensor"}},
      {"moe_gate_up_rows", routed_pair, {"simdgroup", "tensor"}},
      {"expand_rows", expand, {}},
      {"attn_rows", attention, {"cut256"}},
  };
  return entries;
}

}  // namespace lily
