#include "device/shader/estimate.hpp"

#include <algorithm>

#include "args.h"
#include "device/shader/launch.hpp"

namespace lily {
namespace {

constexpr double kOperations = 0.5e12, kBytes = 30e9, kDispatch = 5e-6, kStep = 2e-6;

uint64_t element_bytes(const Dispatch& d, size_t use, uint64_t elements) {
  return use < d.uses.size() && elements ? std::max<uint64_t>(1, d.uses[use].bytes / elements) : 2;
}

// Reads K and V of `keys` tokens: the recorder leaves the arenas out of the traffic.
double key_bytes(const Dispatch& d, const LilyAttnArgs& a, double keys) {
  return 2 * keys * a.Hkv * a.D * double(element_bytes(d, 1, uint64_t(d.rows) * a.Hq * a.D));
}

}  // namespace

Work estimate_work(const Dispatch& d) {
  Work w;
  w.bytes = double(d.bytes_read) + double(d.bytes_written);
  const double rows = d.rows;
  const std::string& k = d.kernel;
  if (k == "gemm" || k == "gemm_residual" || k == "gate_up_rows") {
    const auto& a = args_of<LilyGemmArgs>(d);
    w.operations = (k == "gate_up_rows" ? 4 : 2) * rows * a.N * a.K;
  } else if (k == "moe_gemm_rows" || k == "moe_gate_up_rows") {
    const auto& a = args_of<LilyMoeRowsArgs>(d);
    w.operations = (k == "moe_gate_up_rows" ? 4 : 2) * rows * a.k * a.N * a.K;
  } else if (k == "attn_rows") {
    const auto& a = args_of<LilyAttnArgs>(d);
    const double keys = a.key_blocks ? double(a.key_blocks) * LILY_KV_BLOCK : 8192;
    w.operations = 4 * rows * keys * a.Hq * a.D;
    w.bytes += key_bytes(d, a, keys) * std::max(1.0, rows * (a.Hq / std::max(1u, a.Hkv)) / 32);  // each tile of 32 pairs reads them
  } else if (k == "attn_split" || k == "attn_split_long") {
    const auto& a = args_of<LilyAttnArgs>(d);
    const double keys = double(a.n_splits) * a.blocks_per_split * LILY_KV_BLOCK;
    w.operations = 4 * keys * a.Hq * a.D;
    w.bytes += key_bytes(d, a, keys);
  } else if (k == "gdn_scan") {
    const auto& a = args_of<LilyGdnArgs>(d);
    w.operations = 8 * rows * a.Nv * a.Dk * a.Dv;
    w.steps = rows;
  }
  return w;
}

double estimate_seconds(const Dispatch& d) {
  const Work w = estimate_work(d);
  return kDispatch + w.operations / kOperations + w.bytes / kBytes + w.steps * kStep;
}

std::vector<double> estimate_stages(const std::vector<Dispatch>& dispatches, const Stages& stages) {
  std::vector<double> seconds;
  for (const auto& stage : stages) {
    double sum = 0;
    for (uint32_t d : stage) sum += estimate_seconds(dispatches[d]);
    seconds.push_back(sum);
  }
  return seconds;
}

}  // namespace lily
