#include "device/metal/gpu.hpp"

#include <algorithm>
#include <tuple>
#include <unistd.h>

#include "base/error.hpp"

namespace lily::metal {
namespace {

constexpr int64_t kFamilyApple1 = 1001;
constexpr uint64_t kStorageShared = 0;  // MTLResourceStorageModeShared, hazards tracked between command buffers

// Fork copies no threads and Apple's frameworks do not work after it: the process that loaded the extension is the one that may use them.
const int loaded_by = int(getpid());

// Of all models in this process: they share one working set.
std::atomic<uint64_t> held_by_process{0};

int apple_family(const Messages& m, Object device) {
  int family = 0;
  for (int n = 1; n <= 16; n++)
    if (m.supports_family(device, kFamilyApple1 + n - 1)) family = n;
  return family;
}

std::string shown(uint64_t bytes) {
  char text[32];
  if (bytes < 1ull << 30)
    std::snprintf(text, sizeof text, "%.1f MiB", double(bytes) / double(1ull << 20));
  else
    std::snprintf(text, sizeof text, "%.1f GiB", double(bytes) / double(1ull << 30));
  return text;
}

const char* const kForked = "Metal does not work in a process that was forked after lily was imported; start it anew (multiprocessing: the 'spawn' method)";
bool forked() { return int(getpid()) != loaded_by; }

bool read(const Messages& m, Object device, Limits& out, std::string& reason) {
  out.name = text_of(m, m.device_name(device));
  out.os = m.os_version();
  out.family = apple_family(m, device);
  out.working_set = m.working_set(device);
  out.max_buffer = m.max_buffer(device);
  out.threadgroup_memory = m.max_threadgroup_memory(device);
  out.low_power = m.low_power_mode(m.process_info(m.class_named("NSProcessInfo")));
  if (out.os < 1400) {
    reason = "it needs macOS 14 or later, this is macOS " + std::to_string(out.os / 100) + "." + std::to_string(out.os % 100);
  } else if (out.family < 7 || !m.unified_memory(device)) {
    reason = "the GPU " + out.name + " is of Apple family " + std::to_string(out.family) + ", expected 7 (M1) or later; a virtual machine shows less than the GPU can do";
  } else if (out.threadgroup_memory < 32768) {
    reason = "the GPU " + out.name + " gives a threadgroup " + std::to_string(out.threadgroup_memory) + " bytes, expected 32768";
  } else {
    return true;
  }
  return false;
}

}  // namespace

uint64_t process_bytes() { return held_by_process; }

bool read_limits(Limits& limits, std::string& reason) {
  if (forked()) {
    reason = kForked;
    return false;
  }
  const Messages* m = messages(&reason);
  if (!m) return false;
  Pool pool(*m);
  Owned device(*m, m->system_default_device());
  if (!device) {
    reason = "no Metal GPU is visible to this process (a virtual machine, a sandbox or a remote login may hide it)";
    return false;
  }
  return read(*m, device.get(), limits, reason);
}

std::shared_ptr<Gpu> Gpu::open(bool float32) {
  std::string reason;
  Limits limits;
  if (!read_limits(limits, reason)) throw DeviceError("device 'metal' is not available: " + reason + "; use device='cpu'");
  const Messages& m = *messages();
  Pool pool(m);
  std::shared_ptr<Gpu> gpu(new Gpu(m, float32));
  gpu->limits_ = limits;
  gpu->device_ = Owned(m, m.system_default_device());
  if (!gpu->device_) throw DeviceError("device 'metal' is gone: the system shows no GPU any more");
  for (KernelSource& source : load_sources(float32)) {
    auto library = std::make_unique<Library>();
    library->source = std::move(source);
    for (const std::string& function : library->source.functions) gpu->functions_[function] = library.get();
    gpu->libraries_.push_back(std::move(library));
  }
  // macOS 15 keeps what is in a set resident; before that every command buffer sees to its own.
  if (Object descriptors = m.class_named("MTLResidencySetDescriptor"); descriptors && m.responds(gpu->device_.get(), "newResidencySetWithDescriptor:error:")) {
    Owned descriptor(m, m.init_residency(m.alloc_residency(descriptors)));
    Object error = nullptr;
    gpu->residency_ = Owned(m, m.new_residency_set(gpu->device_.get(), descriptor.get(), &error));
    if (!gpu->residency_) throw DeviceError("the GPU refused a residency set: " + describe(m, error));
  }
  return gpu;
}

Gpu::~Gpu() {
  if (residency_ && residency_requested_) m.end_residency(residency_.get());
}

void Gpu::refuse_fork() const {
  if (forked()) throw DeviceError(kForked);
}

Owned Gpu::new_queue(uint64_t command_buffers) {
  Owned queue(m, m.new_queue(device_.get(), command_buffers));
  if (!queue) throw DeviceError("the GPU " + limits_.name + " gave no command queue; restart the process");
  if (residency_) m.add_residency_set(queue.get(), residency_.get());
  return queue;
}

std::pair<Object, uint8_t*> Gpu::allocate(uint64_t bytes) {
  refuse_fork();
  const uint64_t size = (std::max<uint64_t>(bytes, 1) + kPage - 1) / kPage * kPage;
  const std::string advice = "close other models or lower max_context, load a smaller or more strongly quantised checkpoint, or raise the system's limit "
                             "(sudo sysctl iogpu.wired_limit_mb=MEGABYTES)";
  if (size > limits_.max_buffer) throw OutOfMemoryError("a buffer of the GPU " + limits_.name + ", which holds at most " + shown(limits_.max_buffer), bytes, limits_.max_buffer, advice);
  uint64_t before = held_by_process.fetch_add(size);
  if (before + size > limits_.working_set) {
    held_by_process -= size;
    throw OutOfMemoryError("the GPU " + limits_.name + " may hold " + shown(limits_.working_set) + ", of which this process holds " + shown(before), bytes,
                           limits_.working_set > before ? limits_.working_set - before : 0, advice);
  }
  Pool pool(m);  // the thread may have none
  std::lock_guard<std::mutex> lock(memory_mutex_);
  Object buffer = m.new_buffer(device_.get(), size, kStorageShared);
  void* contents = buffer ? m.contents(buffer) : nullptr;
  if (!contents) {
    if (buffer) m.release(buffer);
    held_by_process -= size;
    throw OutOfMemoryError("the GPU " + limits_.name + " refused a buffer; this process holds " + shown(before), bytes, limits_.working_set > before ? limits_.working_set - before : 0, advice);
  }
  held_ += size;
  if (residency_) {
    m.add_allocation(residency_.get(), buffer);
    residency_changed_ = true;
  }
  return {buffer, static_cast<uint8_t*>(contents)};
}

void Gpu::free(Object buffer, uint64_t bytes) {
  if (forked()) return;  // the parent's
  const uint64_t size = (std::max<uint64_t>(bytes, 1) + kPage - 1) / kPage * kPage;
  Pool pool(m);
  std::lock_guard<std::mutex> lock(memory_mutex_);
  if (residency_) {
    m.remove_allocation(residency_.get(), buffer);
    m.commit_residency(residency_.get());  // the set must not name what is gone
  }
  m.release(buffer);
  held_ -= size;
  held_by_process -= size;
}

void Gpu::commit_residency() {
  std::lock_guard<std::mutex> lock(memory_mutex_);
  if (!residency_changed_) return;
  residency_changed_ = false;
  m.commit_residency(residency_.get());
  if (!residency_requested_) m.request_residency(residency_.get());
  residency_requested_ = true;
}

MetalBuffer::MetalBuffer(std::shared_ptr<Gpu> gpu, uint64_t bytes) : gpu_(std::move(gpu)), bytes_(bytes) { std::tie(object_, contents_) = gpu_->allocate(bytes); }

}  // namespace lily::metal
