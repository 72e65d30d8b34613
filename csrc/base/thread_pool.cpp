#include "base/thread_pool.hpp"

#include <cstdlib>
#include <string>
#include <thread>
#if defined(__linux__)
#include <sched.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "base/error.hpp"

namespace lily {
namespace {

constexpr int kSpins = 4000;  // about 20 to 100 microseconds: longer than a stage's serial gap, shorter than a time slice

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

ThreadPool::ThreadPool(int threads) {
  try {
    for (int i = 1; i < threads; i++) workers_.emplace_back([this] { work(); });
  } catch (...) {
    stop();
    throw;
  }
}

ThreadPool::~ThreadPool() { stop(); }

void ThreadPool::stop() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
    region_.fetch_add(1);
  }
  wake_.notify_all();
  for (auto& w : workers_) w.join();
}

void ThreadPool::drain() {
  for (uint32_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < tasks_;) (*fn_)(i);
}

void ThreadPool::run(uint32_t tasks, const std::function<void(uint32_t)>& fn) {
  if (workers_.empty() || tasks <= 1) {
    for (uint32_t i = 0; i < tasks; i++) fn(i);
    return;
  }
  tasks_ = tasks;
  fn_ = &fn;
  next_.store(0, std::memory_order_relaxed);
  busy_.store(int(workers_.size()), std::memory_order_relaxed);
  bool sleeping;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    region_.fetch_add(1, std::memory_order_release);
    sleeping = sleepers_ > 0;
  }
  if (sleeping) wake_.notify_all();
  drain();
  for (int spins = 0; busy_.load(std::memory_order_acquire) > 0; spins++) {
    if (spins < kSpins)
      pause();
    else
      std::this_thread::yield();
  }
}

void ThreadPool::work() {
  uint64_t seen = 0;
  for (;;) {
    int spins = 0;
    while (region_.load(std::memory_order_acquire) == seen && spins < kSpins) {
      pause();
      spins++;
    }
    if (region_.load(std::memory_order_acquire) == seen) {
      std::unique_lock<std::mutex> lock(mutex_);
      sleepers_++;
      wake_.wait(lock, [&] { return region_.load(std::memory_order_relaxed) != seen; });
      sleepers_--;
    }
    seen++;
    if (stop_) return;
    drain();
    busy_.fetch_sub(1, std::memory_order_release);
  }
}

int default_threads() {
  if (const char* text = std::getenv("LILY_THREADS"); text && *text) {
    char* end = nullptr;
    long n = std::strtol(text, &end, 10);
    if (*end || n < 1 || n > 1024) throw InvalidArgument("LILY_THREADS is '" + std::string(text) + "', expected a number from 1 to 1024");
    return int(n);
  }
#if defined(__linux__)
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return CPU_COUNT(&set) > 0 ? CPU_COUNT(&set) : 1;
#endif
  int n = int(std::thread::hardware_concurrency());
  return n > 0 ? n : 1;
}

}  // namespace lily
