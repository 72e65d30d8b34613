#include "device/sim/sim_device.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <unistd.h>

#include "base/error.hpp"
#include "base/thread.hpp"
#include "device/sim/sim_library.hpp"

namespace lily {
namespace {

constexpr uint64_t kAlign = 256;  // of every buffer and weight, as on the Metal device

// Memory that starts as not-a-number in every type, so that what was never written shows.
class SimBuffer : public Buffer {
 public:
  explicit SimBuffer(uint64_t bytes) : bytes_(bytes) {
    uint64_t rounded = (std::max<uint64_t>(bytes, 1) + kAlign - 1) / kAlign * kAlign;
    data_ = static_cast<uint8_t*>(std::aligned_alloc(kAlign, rounded));
    if (!data_) throw OutOfMemoryError("a buffer", bytes, 0, "close other models or lower max_context");
    std::memset(data_, 0xff, rounded);
  }
  ~SimBuffer() override { std::free(data_); }
  uint8_t* host() override { return data_; }
  uint64_t bytes() const override { return bytes_; }

 private:
  uint8_t* data_;
  uint64_t bytes_;
};

// Who reads the grid of an indirect dispatch. The host's way is for comparison: it waits for the device in the middle of a chunk.
enum class Indirect { device, host };
Indirect indirect_from_environment() {
  const char* text = std::getenv("LILY_INDIRECT");
  if (!text || std::strcmp(text, "device") == 0) return Indirect::device;
  if (std::strcmp(text, "host") == 0) return Indirect::host;
  throw DeviceError(std::string("LILY_INDIRECT is '") + text + "', expected device or host");
}

struct SimProgram : Prepared {
  std::vector<Dispatch> dispatches;
  Stages stages;
  std::vector<Launch> launches;                  // per dispatch
  std::vector<std::vector<std::string>> names;   // of its buffers
};

class SimDevice : public Device {
 public:
  explicit SimDevice(DType storage)
      : storage_(storage), library_(SimLibrary::open(storage)), tuning_(Tuning::from_environment()), indirect_(indirect_from_environment()), info_(sim_device_info(storage)) {
    const char* seed = std::getenv("LILY_SIM_SEED");
    const char* checking = std::getenv("LILY_SIM_CHECK");
    library_->set(!checking || std::strcmp(checking, "0") != 0, seed ? std::strtoull(seed, nullptr, 10) : 0, false);
    worker_ = Thread([this] { work(); });
  }

  ~SimDevice() override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    worker_.join();
  }

  DeviceInfo info() const override { return info_; }
  DType storage() const override { return storage_; }
  DeviceTraits traits() const override { return gpu_traits(); }
  BufferPtr allocate(uint64_t bytes) override { return std::make_shared<SimBuffer>(bytes); }
  BufferPtr wrap(const uint8_t* data, uint64_t bytes, std::shared_ptr<void>) override {  // a copy: kernels need aligned weights
    auto copy = std::make_shared<SimBuffer>(bytes);
    std::memcpy(copy->host(), data, bytes);
    return copy;
  }

  PreparedPtr prepare(std::vector<Dispatch> dispatches, Stages stages) override {
    auto program = std::make_shared<SimProgram>();
    for (const Dispatch& d : dispatches) {
      program->launches.push_back(plan_launch(d, tuning_));
      std::vector<std::string> names;
      for (size_t i = 0; i < d.uses.size(); i++) names.push_back("buffer " + std::to_string(i));
      program->names.push_back(std::move(names));
    }
    program->dispatches = std::move(dispatches);
    program->stages = std::move(stages);
    return program;
  }

  TicketPtr submit(Submission submission) override {
    auto ticket = std::make_shared<Ticket>();
    {
      std::lock_guard<std::mutex> lock(mutex_);
      in_flight_++;
      queue_.push_back({std::move(submission), ticket});
    }
    wake_.notify_one();
    return ticket;
  }

  int in_flight() const override {
    std::lock_guard<std::mutex> lock(mutex_);
    return in_flight_;
  }
  Counters counters() const override {
    std::lock_guard<std::mutex> lock(mutex_);
    return counters_;
  }
  void fail_at(int step, int stage) override {
    std::lock_guard<std::mutex> lock(mutex_);
    fail_step_ = step;
    fail_stage_ = stage;
  }

 private:
  struct Item {
    Submission submission;
    TicketPtr ticket;
  };

  void work() {
    for (;;) {
      Item item;
      int fail_stage = -1;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return stop_ || !queue_.empty(); });
        if (queue_.empty()) return;
        item = std::move(queue_.front());
        queue_.pop_front();
        if (fail_step_ >= 0 && fail_step_-- == 0) fail_stage = fail_stage_;
      }
      execute(item, fail_stage);
      item = {};
    }
  }

  void finish(Item& item, Ticket::Status status, int stage = -1, std::string log = "") {
    item.submission.bindings = {};
    {
      std::lock_guard<std::mutex> lock(mutex_);
      in_flight_--;
    }
    item.ticket->finish(status, stage, std::move(log));
  }

  void execute(Item& item, int fail_stage) {
    Submission& s = item.submission;
    if (s.after && s.after->status() != Ticket::Status::done) return finish(item, Ticket::Status::skipped);
    const auto& program = static_cast<const SimProgram&>(*s.program);
    for (size_t stage = 0; stage < program.stages.size(); stage++) {
      if (s.cancel && s.cancel->load(std::memory_order_relaxed)) return finish(item, Ticket::Status::cancelled, int(stage));
      if (int(stage) == fail_stage) return finish(item, Ticket::Status::failed, int(stage), "a fault was injected by a test");
      library_->barrier();
      for (uint32_t d : program.stages[stage]) {
        try {
          run(program, d, s.bindings);
        } catch (const std::exception& e) {
          return finish(item, Ticket::Status::failed, int(stage), e.what());
        }
        if (s.observe) s.observe(program.dispatches[d], s.bindings);
      }
    }
    {
      std::lock_guard<std::mutex> lock(mutex_);
      counters_.submissions++;
      counters_.stages += program.stages.size();
      counters_.dispatches += program.dispatches.size();
    }
    finish(item, Ticket::Status::done);
  }

  void run(const SimProgram& program, uint32_t index, const BindingSet& bindings) {
    const Dispatch& d = program.dispatches[index];
    std::vector<SimRange> ranges;
    for (const BufferUse& use : d.uses) {
      SimRange range;
      if (use.symbol != kNoSymbol && bindings[use.symbol].buffer) {
        const Binding& b = bindings[use.symbol];
        uint64_t start = b.offset + use.offset;
        range = {b.buffer->host() + start, std::min(use.bytes, b.buffer->bytes() - std::min(start, b.buffer->bytes()))};
      }
      ranges.push_back(range);
    }
    if (d.indirect >= 0 && indirect_ == Indirect::host) return launch_from_host(program, index, ranges);
    library_->launch(d, program.launches[index], ranges, program.names[index]);
  }

  // What was launched before has ended; the grid is read here, and the launch is one whose grid the host knows.
  void launch_from_host(const SimProgram& program, uint32_t index, const std::vector<SimRange>& ranges) {
    Dispatch d = program.dispatches[index];
    Launch launch = program.launches[index];
    library_->barrier();
    const SimRange& grid = ranges[size_t(d.indirect)];
    if (!grid.data || grid.bytes < sizeof(uint32_t) * 3) throw DeviceError(d.kernel + " (" + d.label + "): its grid of three counts is not bound");
    std::memcpy(launch.grid.data(), grid.data, sizeof(uint32_t) * 3);
    d.indirect = -1;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      counters_.host_reads++;
    }
    library_->launch(d, launch, ranges, program.names[index]);
  }

  DType storage_;
  std::shared_ptr<SimLibrary> library_;
  Tuning tuning_;
  Indirect indirect_;
  DeviceInfo info_;
  Thread worker_;
  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Item> queue_;
  int in_flight_ = 0;
  int fail_step_ = -1, fail_stage_ = -1;
  bool stop_ = false;
  Counters counters_;
};

}  // namespace

DevicePtr make_sim_device(DType storage) { return std::make_shared<SimDevice>(storage); }
bool sim_device_configured() {
  const char* path = std::getenv("LILY_SIM");
  return path && *path;
}

DeviceInfo sim_device_info(DType storage) {
  DeviceInfo info;
  info.kind = "sim";
  info.name = storage == DType::f32 ? "sim:float32" : "sim";
  info.isa = "Metal kernels, simulated";
  info.storage = storage == DType::f32 ? "float32" : "bfloat16";
  info.threads = 1;
  long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGE_SIZE);
  info.memory_bytes = pages > 0 && page > 0 ? uint64_t(pages) * uint64_t(page) : 0;
  info.description = std::string("simulator of the Metal kernels, for tests") + (storage == DType::f32 ? ", everything in float32" : "");
  return info;
}

}  // namespace lily
