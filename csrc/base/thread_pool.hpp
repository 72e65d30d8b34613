// A fixed set of threads that run one parallel region at a time. Workers spin for a short bounded time between regions, then sleep, so that
// a decode step's hundreds of regions start fast and a busy machine is not made slower.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <vector>

#include "base/thread.hpp"

namespace lily {

class ThreadPool {
 public:
  explicit ThreadPool(int threads);
  ~ThreadPool();
  int threads() const { return int(workers_.size()) + 1; }
  // Calls fn(i) for i in [0, tasks), the calling thread takes part; returns when all are done. fn must not throw.
  void run(uint32_t tasks, const std::function<void(uint32_t)>& fn);

 private:
  void work();
  void stop();
  void drain();
  std::vector<Thread> workers_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<uint64_t> region_{0};  // bumped when a region starts
  std::atomic<uint32_t> next_{0};
  std::atomic<int> busy_{0};
  uint32_t tasks_ = 0;
  const std::function<void(uint32_t)>* fn_ = nullptr;
  int sleepers_ = 0;
  bool stop_ = false;
};

// LILY_THREADS when set (1 to 1024, else InvalidArgument), otherwise the CPUs this process may use.
int default_threads();

}  // namespace lily
