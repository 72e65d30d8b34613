#include "device/device.hpp"

#include <unordered_map>

#include "base/error.hpp"
#include "base/mapped_file.hpp"
#include "device/cpu/cpu_device.hpp"
#include "device/metal/metal_device.hpp"
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

std::vector<Binding> Device::load(const std::vector<FileRange>& ranges, const LoadProgress& progress) {
  std::unordered_map<std::string, std::shared_ptr<MappedFile>> files;
  std::vector<Binding> bindings;
  uint64_t done = 0, reported = 0;
  for (const FileRange& r : ranges) {
    auto& file = files[r.file];
    if (!file) file = MappedFile::open(r.file, r.file_bytes);
    bindings.push_back({wrap(file->data() + r.offset, r.bytes, file), 0});
    done += r.bytes;
    if (progress && done - reported > (64u << 20)) progress(reported = done);
  }
  return bindings;
}

namespace {

// A stand-in for Metal, there for tests only, is never chosen unasked.
std::string default_device() {
#if defined(__APPLE__)
  if (metal_missing().empty()) return "metal";
#endif
  return "cpu";
}

}  // namespace

DevicePtr open_device(const std::string& asked) {
  const std::string name = asked == "auto" ? default_device() : asked;
  if (name == "cpu") return make_cpu_device(DType::bf16);
  if (name == "cpu:float32") return make_cpu_device(DType::f32);
  if (name == "sim") return make_sim_device(DType::bf16);
  if (name == "sim:float32") return make_sim_device(DType::f32);
  if (name == "metal") return make_metal_device(DType::bf16);
  if (name == "metal:float32") return make_metal_device(DType::f32);
  if (name == "cuda") throw DeviceError("device 'cuda' is not available: this build has no CUDA device; use device='cpu'");
  throw DeviceError("unknown device '" + name + "', expected one of: auto, cpu, cpu:float32, metal, metal:float32, sim, sim:float32");
}

// 32 blocks of 256 keys bound a dispatch: 2,048 rows meet 8,192 keys in it, a quarter of a second on the smallest GPU.
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
  if (kind == "auto") return device_traits(default_device());
  if (kind == "cpu") return {};
  throw DeviceError("unknown device '" + name + "', expected one of: auto, cpu, metal, sim, cuda");
}

std::vector<DeviceInfo> list_devices() {
  std::vector<DeviceInfo> found{cpu_device_info(DType::bf16), cpu_device_info(DType::f32)};
  const std::vector<DeviceInfo> metal = metal_device_infos();
  found.insert(default_device() == "metal" ? found.begin() : found.end(), metal.begin(), metal.end());
  if (sim_device_configured()) found.insert(found.end(), {sim_device_info(DType::bf16), sim_device_info(DType::f32)});
  return found;
}

}  // namespace lily
