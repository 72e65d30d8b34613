#include "device/cpu/cpu_device.hpp"

#include <algorithm>
#include <cstdlib>
#include <deque>
#include <new>
#include <sys/mman.h>
#include <unistd.h>

#include "base/error.hpp"
#include "base/thread.hpp"
#include "base/thread_pool.hpp"
#include "device/cpu/shares.hpp"

namespace lily {
namespace {

class CpuBuffer : public Buffer {
 public:
  explicit CpuBuffer(uint64_t bytes) : bytes_(bytes) {
    const uint64_t alignment = bytes >= 4 * kLargePage ? kLargePage : 64;
    uint64_t rounded = (std::max<uint64_t>(bytes, 1) + alignment - 1) / alignment * alignment;
    data_ = static_cast<uint8_t*>(std::aligned_alloc(alignment, rounded));
    if (!data_) throw OutOfMemoryError("a buffer", bytes, 0, "close other models or lower max_context");
#if defined(MADV_HUGEPAGE)
    if (alignment == kLargePage) madvise(data_, rounded, MADV_HUGEPAGE);  // a wish; without it all is as before
#endif
  }
  ~CpuBuffer() override { std::free(data_); }
  uint8_t* host() override { return data_; }
  uint64_t bytes() const override { return bytes_; }

 private:
  static constexpr uint64_t kLargePage = 2 << 20;  // a page fault for each 4 KiB costs more than filling them
  uint8_t* data_;
  uint64_t bytes_;
};

class MappedBuffer : public Buffer {
 public:
  MappedBuffer(const uint8_t* data, uint64_t bytes, std::shared_ptr<void> owner) : data_(data), bytes_(bytes), owner_(std::move(owner)) {}
  uint8_t* host() override { return const_cast<uint8_t*>(data_); }
  uint64_t bytes() const override { return bytes_; }

 private:
  const uint8_t* data_;
  uint64_t bytes_;
  std::shared_ptr<void> owner_;
};

struct CpuProgram : Prepared {
  std::vector<Dispatch> dispatches;
  Stages stages;
  std::vector<cpu::KernelFn> kernels;  // per dispatch
};

class CpuDevice : public Device {
 public:
  explicit CpuDevice(DType storage) : storage_(storage), pool_(default_threads()), shares_(uint32_t(pool_.threads())), info_(cpu_device_info(storage)) {
    worker_ = Thread([this] { work(); });
  }

  ~CpuDevice() override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    worker_.join();
  }

  DeviceInfo info() const override { return info_; }
  DType storage() const override { return storage_; }
  BufferPtr allocate(uint64_t bytes) override { return std::make_shared<CpuBuffer>(bytes); }
  BufferPtr wrap(const uint8_t* data, uint64_t bytes, std::shared_ptr<void> owner) override {
    return std::make_shared<MappedBuffer>(data, bytes, std::move(owner));
  }

  PreparedPtr prepare(std::vector<Dispatch> dispatches, Stages stages) override {
    auto program = std::make_shared<CpuProgram>();
    for (const Dispatch& d : dispatches) program->kernels.push_back(find_cpu_kernel(d.kernel, choose_cpu_kernel(d.kernel).isa, storage_));
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

  void set_clock(StageTimes clock) override {
    std::lock_guard<std::mutex> lock(mutex_);
    clock_ = std::move(clock);
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
      item = {};  // buffers go before anyone can see the device idle
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
    const auto& program = static_cast<const CpuProgram&>(*s.program);
    StageTimes clock;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      clock = clock_;
    }
    std::vector<double> seconds;
    for (size_t stage = 0; stage < program.stages.size(); stage++) {
      if (s.cancel && s.cancel->load(std::memory_order_relaxed)) return finish(item, Ticket::Status::cancelled, int(stage));
      if (int(stage) == fail_stage) return finish(item, Ticket::Status::failed, int(stage), "a fault was injected by a test");
      if (!clock) {
        run_stage(program, program.stages[stage], s);
        continue;
      }
      const auto begin = std::chrono::steady_clock::now();
      run_stage(program, program.stages[stage], s);
      seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    }
    if (clock) clock(s.program, seconds);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      counters_.submissions++;
      counters_.stages += program.stages.size();
      counters_.dispatches += program.dispatches.size();
    }
    finish(item, Ticket::Status::done);
  }

  void run_stage(const CpuProgram& program, const std::vector<uint32_t>& stage, Submission& s) {
    if (s.observe) {
      for (uint32_t d : stage) {
        run_group(program, {d}, s.bindings);
        s.observe(program.dispatches[d], s.bindings);
      }
    } else {
      run_group(program, stage, s.bindings);
    }
  }

  void run_group(const CpuProgram& program, const std::vector<uint32_t>& stage, const BindingSet& bindings) {
    bind(program, stage, bindings);
    if (pool_.threads() == 1) {
      for (size_t i = 0; i < stage.size(); i++) calls_[i].fn(calls_[i].call, 0, program.dispatches[stage[i]].groups);
    } else {
      run_shares(program, stage);
    }
  }

  void bind(const CpuProgram& program, const std::vector<uint32_t>& stage, const BindingSet& bindings) {
    calls_.clear();
    pointers_.clear();
    size_t uses = 0;
    for (uint32_t d : stage) uses += program.dispatches[d].uses.size();
    pointers_.reserve(uses);  // calls_ points into it
    for (uint32_t d : stage) {
      const Dispatch& dispatch = program.dispatches[d];
      const size_t pointers = pointers_.size();
      for (const BufferUse& use : dispatch.uses) {
        void* p = nullptr;
        if (use.symbol != kNoSymbol && bindings[use.symbol].buffer) p = bindings[use.symbol].buffer->host() + bindings[use.symbol].offset + use.offset;
        pointers_.push_back(p);
      }
      calls_.push_back({program.kernels[d], {dispatch.args.data(), pointers_.data() + pointers}});
    }
  }

  // Each thread has a share of the stage. A kernel makes its vector ready, or packs its rows, once for its share and what it takes over.
  void run_shares(const CpuProgram& program, const std::vector<uint32_t>& stage) {
    parts_.clear();
    const bool step = program.dispatches[stage[0]].rows == 1;
    uint64_t groups = 0;
    for (uint32_t d : stage) {
      const Dispatch& dispatch = program.dispatches[d];
      const uint64_t bytes = std::max<uint64_t>(1, dispatch.bytes_read / std::max(1u, dispatch.groups));
      if (step)
        parts_.push_back({dispatch.groups, bytes, dispatch.even ? uint32_t(1 + kPieceBytes / bytes) : 1});
      else
        parts_.push_back({dispatch.groups, 1, 1 + dispatch.groups / (kPiecesOfChunk * uint32_t(pool_.threads()))});
      groups += dispatch.groups;
    }
    shares_.divide(parts_, step ? kStepFraction : kChunkFraction);
    if (groups == 1) return take(0);
    pool_.run(uint32_t(pool_.threads()), [this](uint32_t thread) { take(thread); });
  }
  // In a step work is bytes, and taking a piece costs less than a thousandth of reading it. In a chunk threadgroups are alike, and threads may not be: a matrix
  // unit has different speeds on different cores.
  static constexpr uint64_t kPieceBytes = 32 << 10;
  static constexpr uint32_t kPiecesOfChunk = 64, kStepFraction = 2, kChunkFraction = 4;

  struct Place {
    Shares* shares;
    uint32_t part, thread;
    bool steals;
  };
  static bool next_piece(void* of, uint32_t* begin, uint32_t* end) {
    const Place& p = *static_cast<Place*>(of);
    while (!p.shares->own(p.part, p.thread, begin, end))
      if (!p.steals || !p.shares->steal(p.part, p.thread)) return false;
    return true;
  }
  void take(uint32_t thread) {
    const uint32_t parts = uint32_t(shares_.parts());
    for (uint32_t i = parts == 1 ? 1 : 0; i < 2 * parts; i++) {  // its own share of each dispatch, then what others have left of each
      Place place{&shares_, i % parts, thread, i >= parts};
      Call call = calls_[place.part];
      call.call.next = next_piece;
      call.call.of = &place;
      uint32_t begin, end;
      while (next_piece(&place, &begin, &end)) call.fn(call.call, begin, end);
    }
  }

  struct Call {
    cpu::KernelFn fn;
    cpu::KernelCall call;
  };

  DType storage_;
  ThreadPool pool_;
  Shares shares_;
  DeviceInfo info_;
  Thread worker_;
  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Item> queue_;
  int in_flight_ = 0;
  int fail_step_ = -1, fail_stage_ = -1;
  bool stop_ = false;
  Counters counters_;
  StageTimes clock_;
  // of the worker thread alone, kept to save allocations
  std::vector<Shares::Part> parts_;
  std::vector<Call> calls_;
  std::vector<void*> pointers_;
};

}  // namespace

DevicePtr make_cpu_device(DType storage) { return std::make_shared<CpuDevice>(storage); }

DeviceInfo cpu_device_info(DType storage) {
  DeviceInfo info;
  info.kind = "cpu";
  info.name = storage == DType::f32 ? "cpu:float32" : "cpu";
  info.isa = cpu_instruction_sets().front();
  info.storage = storage == DType::f32 ? "float32" : "bfloat16";
  info.threads = default_threads();
  long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGE_SIZE);
  info.memory_bytes = pages > 0 && page > 0 ? uint64_t(pages) * uint64_t(page) : 0;
  info.description = "CPU, " + std::to_string(info.threads) + (info.threads == 1 ? " thread, " : " threads, ") + info.isa +
                     (storage == DType::f32 ? ", everything in float32 (for debugging)" : "");
  return info;
}

}  // namespace lily
