// One GPU as Metal shows it: limits, memory, libraries and pipelines. Everything here may be called from any thread.
#pragma once
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "device/device.hpp"
#include "device/metal/messages.hpp"
#include "device/metal/sources.hpp"
#include "device/shader/launch.hpp"

namespace lily::metal {

constexpr uint64_t kPage = 16384;  // of memory on Apple silicon, bytes

struct Limits {
  std::string name;
  uint32_t os = 0;      // 26.2 is 2602
  int family = 0;       // MTLGPUFamilyAppleN: N; 7 is M1, 10 has matrix units
  uint64_t working_set = 0, max_buffer = 0, threadgroup_memory = 0;
  bool low_power = false;
};

// Asks the system's default device. False with a reason where there is none that Lily can use.
bool read_limits(Limits& limits, std::string& reason);

uint64_t process_bytes();  // that the models of this process hold on their GPUs

class Gpu : public std::enable_shared_from_this<Gpu> {
 public:
  static std::shared_ptr<Gpu> open(bool float32);  // DeviceError
  ~Gpu();

  const Messages& m;
  const Limits& limits() const { return limits_; }
  bool float32() const { return float32_; }

  // A new queue with so many command buffers, on which what is allocated here is resident. Owned by the caller.
  Owned new_queue(uint64_t command_buffers);

  // Shared memory and where the host sees it; OutOfMemoryError with what is held already and the advice. Give back with free().
  std::pair<Object, uint8_t*> allocate(uint64_t bytes);
  void free(Object buffer, uint64_t bytes);
  void commit_residency();         // what was allocated or freed since the last time; before a submission
  uint64_t held() const { return held_; }

  // The pipeline of a launch, made at the first call; lives as long as the GPU. DeviceError with the compiler's text.
  Object pipeline(const Launch& launch);
  // Compiles the libraries of these launches side by side.
  void compile(const std::vector<Launch>& launches);
  // Empty when the library of tensor operations compiles here; else the reason. It is asked for apart from the others.
  std::string compile_tensor();

  void refuse_fork() const;  // DeviceError in a forked child, before any message

 private:
  struct Library {
    KernelSource source;
    std::once_flag once;
    Owned library;
    std::string failure;
  };
  Gpu(const Messages& messages, bool float32) : m(messages), float32_(float32) {}
  Library& library_of(const std::string& function);
  void build(Library& library);
  Owned make_pipeline(const Launch& launch, Library& library);

  bool float32_;
  Limits limits_;
  Owned device_;
  Owned residency_;
  std::mutex memory_mutex_;
  bool residency_changed_ = false, residency_requested_ = false;
  std::atomic<uint64_t> held_{0};
  std::vector<std::unique_ptr<Library>> libraries_;
  std::map<std::string, Library*> functions_;
  std::mutex pipeline_mutex_;
  std::map<std::string, Owned> pipelines_;
};

// Memory that the GPU and the host share.
class MetalBuffer : public Buffer {
 public:
  MetalBuffer(std::shared_ptr<Gpu> gpu, uint64_t bytes);
  ~MetalBuffer() override { gpu_->free(object_, bytes_); }
  uint8_t* host() override { return contents_; }
  uint64_t bytes() const override { return bytes_; }
  void* handle() override { return object_; }

 private:
  std::shared_ptr<Gpu> gpu_;
  uint64_t bytes_;
  Object object_;
  uint8_t* contents_;
};

}  // namespace lily::metal
