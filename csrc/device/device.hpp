// The device interface: memory, prepared programs, and submissions that run in the order in which they were made.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/dtype.hpp"
#include "base/error.hpp"
#include "device/dispatch.hpp"

namespace lily {

// Host-visible device memory. The host touches a range only while no submission in flight uses it.
class Buffer {
 public:
  virtual ~Buffer() = default;
  virtual uint8_t* host() = 0;
  virtual uint64_t bytes() const = 0;
  virtual void* handle() { return nullptr; }  // what the device knows it by, where that is not its address
};
using BufferPtr = std::shared_ptr<Buffer>;

struct Binding {
  BufferPtr buffer;
  uint64_t offset = 0;
};
using Bindings = std::vector<Binding>;  // indexed by Symbol

// What a submission runs on: weights, the same every time and shared, and behind them what is bound anew.
struct BindingSet {
  std::shared_ptr<const Bindings> fixed;
  Bindings dynamic;  // symbols from fixed->size() on
  const Binding& operator[](Symbol s) const { return s < fixed->size() ? (*fixed)[s] : dynamic[s - fixed->size()]; }
  void set(Symbol s, Binding b) { dynamic[s - fixed->size()] = std::move(b); }
};

// The outcome of one submission. A device records failures here and never throws from its own thread.
class Ticket {
 public:
  enum class Status { pending, done, failed, cancelled, skipped };
  Status status() const;
  bool wait_for(std::chrono::milliseconds timeout) const;  // true when no longer pending
  void check() const;  // throws GPUError or CancelledError; call when not pending
  void finish(Status status, int stage = -1, std::string log = "");

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  Status status_ = Status::pending;
  int stage_ = -1;
  std::string log_;
};
using TicketPtr = std::shared_ptr<Ticket>;

// Bytes of a file, as a checked safetensors header promised them.
struct FileRange {
  std::string file;
  uint64_t file_bytes = 0, offset = 0, bytes = 0;
};
using LoadProgress = std::function<void(uint64_t)>;  // bytes read so far; may throw to stop

// A program made ready for one device: kernels looked up, arguments laid out.
class Prepared {
 public:
  virtual ~Prepared() = default;
};
using PreparedPtr = std::shared_ptr<const Prepared>;

struct Submission {
  PreparedPtr program;
  BindingSet bindings;  // must keep every buffer alive; dropped when the submission has finished
  TicketPtr after;    // when that one did not succeed, this one is skipped
  std::shared_ptr<std::atomic<bool>> cancel;  // polled between stages
  std::function<void(const Dispatch&, const BindingSet&)> observe;  // after each dispatch, dispatches one by one (trace)
};

struct DeviceInfo {
  std::string name, kind, description, isa, storage;
  int threads = 0;
  uint64_t memory_bytes = 0;  // that models may use
  std::string advice;         // how a user gets more of it, where there is a way
};

// Called on the device's thread after each submission that ran, with the seconds of its stages.
using StageTimes = std::function<void(const PreparedPtr&, const std::vector<double>&)>;

// What a device wants of the programs that are recorded for it.
struct DeviceTraits {
  bool tile_map = false;          // routed rows go through a tile map and indirect grids
  bool expand = false;            // weights of matrix products are dequantised to a buffer first: for comparison
  uint32_t tile_rows = 0;         // rows of its tiles; 0: 16 or 32 by the mean rows of an expert
  uint32_t key_blocks = 0;        // K/V blocks of one dispatch of prefill attention; 0: all of them
  bool ninth_expert = false;      // the shared expert's gate and up go with those of the chosen ones, instead of beside the router
  uint32_t long_context = 0;      // tokens from which decode attention takes its long form; 0: never
};
DeviceTraits gpu_traits();
DeviceTraits device_traits(const std::string& name);  // without opening it; DeviceError for an unknown name

// What a device has executed since it was opened.
struct Counters {
  uint64_t submissions = 0, stages = 0, dispatches = 0;
  uint64_t host_reads = 0;  // grids that the host read back between dispatches: only with LILY_INDIRECT=host
};

class Device {
 public:
  virtual ~Device() = default;
  virtual DeviceInfo info() const = 0;
  virtual DType storage() const = 0;                      // bf16, or f32 in the debug mode
  virtual DeviceTraits traits() const { return {}; }
  virtual BufferPtr allocate(uint64_t bytes) = 0;         // contents undefined; OutOfMemoryError
  virtual BufferPtr wrap(const uint8_t* data, uint64_t bytes, std::shared_ptr<void> owner) = 0;  // read-only weights in mapped memory
  // Weights of a checkpoint, in the layout that this device reads; a mapping of the file where the device reads host memory.
  virtual std::vector<Binding> load(const std::vector<FileRange>& ranges, const LoadProgress& progress);
  virtual PreparedPtr prepare(std::vector<Dispatch> dispatches, Stages stages) = 0;
  virtual TicketPtr submit(Submission submission) = 0;
  virtual int in_flight() const = 0;
  virtual Counters counters() const = 0;
  // An empty function stops it. Set while nothing is in flight.
  virtual void set_clock(StageTimes) { throw DeviceError("this device does not time its stages; profile on the cpu"); }
  // Test hook: the submission numbered `step` from now on (0 is the next) fails at `stage`.
  virtual void fail_at(int step, int stage) = 0;
};
using DevicePtr = std::shared_ptr<Device>;

// "auto", "cpu", "cpu:float32", "metal", "metal:float32", "sim", "sim:float32"; DeviceError for a device that this build or machine lacks.
DevicePtr open_device(const std::string& name);
std::vector<DeviceInfo> list_devices();

}  // namespace lily
