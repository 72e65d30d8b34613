// The stand-in's GPU: a thread of its own that runs command buffers in the order in which they were committed, each dispatch on the simulator.
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <thread>

#include "../../csrc/device/shader/sim_abi.h"
#include "standin.hpp"

namespace lily_standin {
namespace {

constexpr uint64_t kScheduled = 3, kCompleted = 4, kFailed = 5;

class Gpu {
 public:
  void submit(CommandBuffer* buffer) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!started_) {
      started_ = true;
      std::thread([this] { work(); }).detach();
    }
    queue_.push_back(buffer);
    wake_.notify_one();
  }

 private:
  void work() {
    for (;;) {
      CommandBuffer* buffer;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return !queue_.empty(); });
        buffer = queue_.front();
        queue_.pop_front();
      }
      if (buffer->fault.rfind("slow:", 0) == 0) std::this_thread::sleep_for(std::chrono::milliseconds(std::atoi(buffer->fault.c_str() + 5)));
      if (buffer->fault == "hang") continue;  // nobody ever hears of it
      std::string failure;
      int64_t code = 0;
      if (buffer->fault.rfind("error:", 0) == 0) {
        code = std::atoi(buffer->fault.c_str() + 6);
        failure = "a fault was injected at commit";
      } else {
        failure = run(*buffer);
        if (!failure.empty()) code = 3;
      }
      end(buffer, failure, code);
    }
  }

  void* context(bool float32) {
    void*& c = contexts_[float32];
    if (!c) {
      c = lily_sim_open(float32 ? 1 : 0);
      const char* seed = std::getenv("LILY_SIM_SEED");
      const char* checking = std::getenv("LILY_SIM_CHECK");
      lily_sim_set(c, !checking || std::strcmp(checking, "0") != 0, seed ? std::strtoull(seed, nullptr, 10) : 0, 0);
    }
    return c;
  }

  std::string run(CommandBuffer& buffer) {
    {
      std::lock_guard<std::recursive_mutex> lock(world().mutex);
      buffer.status = kScheduled;
    }
    for (const Pass& pass : buffer.passes) {
      bool first = true;
      for (const Command& c : pass.commands) {
        // Passes, and the dispatches of a serial one, wait for each other: buffers are of the kind whose hazards Metal tracks.
        if (first || c.barrier || !pass.concurrent)
          for (void* known : contexts_)
            if (known) lily_sim_barrier(known);
        first = false;
        if (c.barrier) continue;
        if (std::string failure = launch(c); !failure.empty()) return failure;
      }
    }
    return "";
  }

  std::string launch(const Command& c) {
    LilySimBuffer buffers[20];
    static const char* const kNames[20] = {"buffer 0",  "buffer 1",  "buffer 2",  "buffer 3",  "buffer 4",  "buffer 5",  "buffer 6",  "buffer 7",  "buffer 8",  "buffer 9",
                                           "buffer 10", "buffer 11", "buffer 12", "buffer 13", "buffer 14", "buffer 15", "buffer 16", "buffer 17", "buffer 18", "buffer 19"};
    uint32_t n = 0;
    for (uint32_t i = 0; i < 20; i++) {
      buffers[i] = {nullptr, 0, 0, kNames[i]};
      if (!(c.present >> i & 1) || !c.buffers[i]) continue;
      const uint32_t access = (c.reads >> i & 1 ? LILY_SIM_READ : 0u) | (c.writes >> i & 1 ? LILY_SIM_WRITE : 0u);
      buffers[i] = {c.buffers[i]->data + c.offsets[i], c.bytes[i], access, kNames[i]};
      n = i + 1;
    }
    LilySimLaunch l{};
    l.function = c.pipeline->function.c_str();
    l.label = c.label.c_str();
    l.constants = c.pipeline->constants.data();
    l.n_constants = uint32_t(c.pipeline->constants.size());
    std::memcpy(l.grid, c.grid, sizeof l.grid);
    if (c.indirect) std::memcpy(l.grid, c.indirect->data + c.indirect_offset, sizeof l.grid);
    l.threads = c.threads;
    l.buffers = buffers;
    l.n_buffers = n;
    l.args = c.args.data();
    l.args_bytes = uint32_t(c.args.size());
    l.present = c.present;
    char message[2048] = "";
    if (lily_sim_launch(context(c.pipeline->float32), &l, message, sizeof message)) return message;
    // A GPU whose matrix units err: by one bit in tiles of 16 rows (1), or grossly (2).
    const double wrong = world().property("wrong_tensor", 0);
    if (wrong != 0 && c.pipeline->function.find("_tensor_m16") != std::string::npos && c.buffers[2]) {
      auto* y = reinterpret_cast<uint32_t*>(c.buffers[2]->data + c.offsets[2]);
      *y ^= wrong == 1 ? 1u : 0x00400000u;
    }
    return "";
  }

  void end(CommandBuffer* buffer, const std::string& failure, int64_t code) {
    std::vector<std::pair<CompletedFn, void*>> handlers;
    {
      World& w = world();
      std::lock_guard<std::recursive_mutex> lock(w.mutex);
      double dispatches = 0;
      std::set<Buf*> used;
      std::set<Pipeline*> pipelines;
      buffer->queue->outstanding--;
      for (const Pass& pass : buffer->passes)
        for (const Command& c : pass.commands) {
          dispatches += !c.barrier;
          if (c.pipeline) pipelines.insert(c.pipeline);
          for (Buf* b : c.buffers)
            if (b) used.insert(b);
          if (c.indirect) used.insert(c.indirect);
        }
      for (Buf* b : used) b->uses--;
      for (Pipeline* p : pipelines) p->uses--;
      buffer->passes.clear();
      buffer->start = clock_;
      buffer->end = clock_ += dispatches * w.property("seconds_per_dispatch", 0);
      buffer->status = failure.empty() ? kCompleted : kFailed;
      if (!failure.empty()) {
        buffer->error = new Err(failure, "MTLCommandBufferErrorDomain", code);
        w.objects.push_back(buffer->error);
      }
      handlers.swap(buffer->handlers);
    }
    for (auto& [fn, context] : handlers) fn(context, buffer);
    std::lock_guard<std::recursive_mutex> lock(world().mutex);
    buffer->refs--;  // what Metal held while it ran
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<CommandBuffer*> queue_;
  bool started_ = false;
  void* contexts_[2] = {};
  double clock_ = 0;
};

}  // namespace

void submit(CommandBuffer* buffer) {
  static Gpu* gpu = new Gpu;  // its thread outlives everything
  gpu->submit(buffer);
}

}  // namespace lily_standin
