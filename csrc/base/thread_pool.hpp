// A fixed set of threads that run one parallel region at a time. Who waits, for a region to start or to end, spins for a bounded time and
// then sleeps, so that a decode step's hundreds of regions follow each other fast and an idle model takes no processor time.
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
  bool open() const;  // tasks of a region wait for a thread
  std::vector<Thread> workers_;
  std::mutex mutex_;
  std::condition_variable wake_, finished_;
  // Tasks of the region in the upper half, the next one in the lower: taking a task and seeing whether there is one are a single step. A region ends
  // with its last task, so a worker that has been kept away by other processes is not waited for.
  std::atomic<uint64_t> next_{0};
  std::atomic<uint32_t> done_{0};
  std::atomic<bool> waiting_{false};  // the caller of run sleeps
  std::atomic<bool> stop_{false};
  const std::function<void(uint32_t)>* fn_ = nullptr;  // written before next_; a task that has been taken keeps it in place
  int sleepers_ = 0;
};

// LILY_THREADS when set (1 to 1024, else InvalidArgument), otherwise the CPUs this process may use.
int default_threads();

}  // namespace lily
