#include "base/thread_pool.hpp"

#include <chrono>
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

// Longer than the gap between two stages and than the imbalance of one, also when another process takes its share of the processors:
// a thread that sleeps too early hands its processor over for a whole time slice.
constexpr std::chrono::microseconds kSpin{1000};

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Waits for `ready`, a bounded time; whether it came.
template <class Ready> bool spin(Ready ready) {
  const auto end = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 64; i++) {
      if (ready()) return true;
      pause();
    }
  } while (std::chrono::steady_clock::now() < end);
  return ready();
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
    stop_.store(true);
  }
  wake_.notify_all();
  for (auto& w : workers_) w.join();
}

bool ThreadPool::open() const {
  const uint64_t v = next_.load();
  return uint32_t(v) < uint32_t(v >> 32);
}

void ThreadPool::drain() {
  for (;;) {
    const uint64_t v = next_.fetch_add(1);
    const uint32_t i = uint32_t(v), tasks = uint32_t(v >> 32);
    if (i >= tasks) return;
    (*fn_)(i);
    if (done_.fetch_add(1) + 1 == tasks && waiting_.load()) {
      std::lock_guard<std::mutex> lock(mutex_);  // not between the other's check and its sleep
      finished_.notify_one();
    }
  }
}

void ThreadPool::run(uint32_t tasks, const std::function<void(uint32_t)>& fn) {
  if (workers_.empty() || tasks <= 1) {
    for (uint32_t i = 0; i < tasks; i++) fn(i);
    return;
  }
  fn_ = &fn;
  done_.store(0);
  bool sleeping;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    next_.store(uint64_t(tasks) << 32);
    sleeping = sleepers_ > 0;
  }
  if (sleeping) wake_.notify_all();
  drain();
  auto finished = [&] { return done_.load() == tasks; };
  if (spin(finished)) return;
  std::unique_lock<std::mutex> lock(mutex_);
  waiting_.store(true);
  finished_.wait(lock, finished);
  waiting_.store(false);
}

void ThreadPool::work() {
  auto called = [this] { return open() || stop_.load(); };
  for (;;) {
    if (!spin(called)) {
      std::unique_lock<std::mutex> lock(mutex_);
      sleepers_++;
      wake_.wait(lock, called);
      sleepers_--;
    }
    if (stop_.load()) return;
    drain();
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
