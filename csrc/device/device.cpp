#include "device/device.hpp"

#include "base/error.hpp"
#include "device/cpu/cpu_device.hpp"
#include "device/shader/launch.hpp"
#include "device/sim/sim_device.hpp"

namespace lily {

Ticket::Status Ticket::status() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return status_;
}

bool Ticket::wait_for(std::chrono::milliseconds timeout) const {
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait_for(lock, timeout, [&] { return status_ != Status::pending; });
}

void Ticket::check() const {
  std::lock_guard<std::mutex> lock(mutex_);
  if (status_ == Status::failed) throw GPUError(stage_, log_);
  if (status_ == Status::skipped) throw GPUError(-1, "skipped: the step before it failed");
  if (status_ == Status::cancelled) throw CancelledError("cancelled");
}

void Ticket::finish(Status status, int stage, std::string log) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    status_ = status;
    stage_ = stage;
    log_ = std::move(log);
  }
  changed_.notify_all();
}

DevicePtr open_device(const std::string& name) {
  if (name == "auto" || name == "cpu") return make_cpu_device(DType::bf16);
  if (name == "cpu:float32") return make_cpu_device(DType::f32);
  if (name == "sim") return make_sim_device(DType::bf16);
  if (name == "sim:float32") return make_sim_device(DType::f32);
  if (name == "metal") throw DeviceError("device 'metal' is not available: this build has no Metal device; use device='cpu'");
  if (name == "cuda") throw DeviceError("device 'cuda' is not available: this build has no CUDA device; use device='cpu'");
  throw DeviceError("unknown device '" + name + "', expected one of: auto, cpu, cpu:float32, sim, sim:float32");
}

// 32 blocks of 256 keys bound a dispatch: 2,048 rows meet 8,192 keys in it, tens of milliseconds on the smallest GPU.
DeviceTraits gpu_traits() {
  DeviceTraits t{.tile_map = true, .key_blocks = 32, .long_context = 32768};
  const Tuning tuning = Tuning::from_environment();
  if (const std::string* tiles = tuning.variant("moe_scan")) t.tile_rows = *tiles == "tile16" ? 16 : 32;
  if (const std::string* product = tuning.variant("gemm")) t.expand = *product == "expand";
  if (tuning.variant("attn_rows")) t.key_blocks = 1;  // cut256
  if (const std::string* experts = tuning.variant("moe_gate_up")) t.ninth_expert = *experts == "ninth";
  return t;
}

DeviceTraits device_traits(const std::string& name) {
  const std::string kind = name.substr(0, name.find(':'));
  if (kind == "metal" || kind == "sim" || kind == "cuda") return gpu_traits();
  if (kind == "cpu" || kind == "auto") return {};
  throw DeviceError("unknown device '" + name + "', expected one of: auto, cpu, metal, sim, cuda");
}

std::vector<DeviceInfo> list_devices() {
  std::vector<DeviceInfo> found{cpu_device_info(DType::bf16), cpu_device_info(DType::f32)};
  if (sim_device_configured()) found.insert(found.end(), {sim_device_info(DType::bf16), sim_device_info(DType::f32)});
  return found;
}

}  // namespace lily
