// The thread pool under load: regions far shorter than a thread takes to wake, on more threads than the machine has.
#include <atomic>
#include <chrono>
#include <thread>

#include "base/error.hpp"
#include "base/thread_pool.hpp"
#include "check.hpp"
#include "fixture.hpp"

namespace lily::test {
namespace {

LILY_TEST(pool_runs_every_task_once) {
  for (int threads = 1; threads <= 8; threads++) {
    ThreadPool pool(threads);
    CHECK_EQUAL(pool.threads(), threads);
    std::vector<uint32_t> counts(67);  // plain memory: the region's end must order it
    const uint32_t regions = threads <= 2 ? 4000 : 600;
    for (uint32_t region = 0; region < regions; region++) {
      const uint32_t tasks = region % 68;
      pool.run(tasks, [&](uint32_t i) { counts[i]++; });
      if (region % 68 == 67) {
        for (uint32_t i = 0; i < counts.size(); i++) CHECK_EQUAL(counts[i], (region + 1) / 68 * (67 - i));
      }
    }
  }
}

// Workers go to sleep between regions and are woken again.
LILY_TEST(pool_wakes_sleepers) {
  ThreadPool pool(4);
  std::atomic<uint32_t> done{0};
  for (uint32_t i = 0; i < 60; i++) {
    pool.run(9, [&](uint32_t) { done++; });
    CHECK_EQUAL(done.load(), (i + 1) * 9);
    std::this_thread::sleep_for(std::chrono::milliseconds(i % 3));
  }
}

LILY_TEST(pools_come_and_go) {
  for (int i = 0; i < 100; i++) {
    ThreadPool pool(1 + i % 8);
    std::atomic<uint32_t> done{0};
    if (i % 2) pool.run(20, [&](uint32_t) { done++; });
    CHECK_EQUAL(done.load(), i % 2 ? 20u : 0u);
  }
}

LILY_TEST(pool_threads_from_the_environment) {
  {
    Environment threads("LILY_THREADS", "3");
    CHECK_EQUAL(default_threads(), 3);
  }
  for (const char* bad : {"0", "x", "2x", "-1", "1025"}) {
    Environment threads("LILY_THREADS", bad);
    CHECK_THROWS(InvalidArgument, default_threads());
  }
}

}  // namespace
}  // namespace lily::test
