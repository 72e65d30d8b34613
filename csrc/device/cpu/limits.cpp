#include "device/cpu/limits.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <functional>
#include <memory>

#include "base/error.hpp"
#include "base/thread_pool.hpp"
#include "device/cpu/cpu_device.hpp"
#include "device/cpu/limits_loops.hpp"

#if defined(LILY_X86)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace lily {
namespace {

bool has_set(const char* isa) {
  auto sets = cpu_instruction_sets();
  return std::find(sets.begin(), sets.end(), isa) != sets.end();
}

#if defined(LILY_X86)
bool has_vnni() { return has_set("avx512") && __builtin_cpu_supports("avx512vnni"); }

// The processor has the tile unit and the kernel lends its registers to this process.
bool has_amx() {
#if defined(__linux__)
  static const bool granted = [] {
    constexpr unsigned kTile = 1u << 24, kBf16 = 1u << 22, kInt8 = 1u << 25;
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & (kTile | kBf16 | kInt8)) != (kTile | kBf16 | kInt8)) return false;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }();
  return granted;
#else
  return false;
#endif
}
#endif

double thread_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return double(now.tv_sec) + 1e-9 * double(now.tv_nsec);
}

// Work of one round of a kind, and the loop: `rounds` of it by thread `index`.
struct Loop {
  double work;
  std::function<double(uint64_t rounds, uint32_t index)> run;
};

struct Memory {
  explicit Memory(uint64_t size) : bytes(size), data(static_cast<uint8_t*>(std::aligned_alloc(limits::kLineBytes, size)), &std::free) {
    if (!data) throw OutOfMemoryError("a buffer to read", size, 0, "measure a smaller working set");
  }
  uint64_t bytes;
  std::unique_ptr<uint8_t, void (*)(void*)> data;
};

Loop read_loop(const std::shared_ptr<Memory>& memory, int threads) {
  auto read = limits::read_portable;
#if defined(LILY_X86)
  if (has_set("avx512"))
    read = limits::read_avx512;
  else if (has_set("avx2"))
    read = limits::read_avx2;
#endif
  const uint64_t lines = memory->bytes / limits::kLineBytes;
  return {double(memory->bytes) / threads, [=](uint64_t rounds, uint32_t index) {
            const uint64_t begin = lines * index / threads * limits::kLineBytes, end = lines * (index + 1) / threads * limits::kLineBytes;
            uint64_t sum = 0;
            for (uint64_t r = 0; r < rounds; r++) {
              sum += read(memory->data.get() + begin, end - begin);
              asm volatile("" ::: "memory");
            }
            return double(sum);
          }};
}

Loop lookup_loop(const std::shared_ptr<Memory>& memory) {
  auto lookup = limits::lookup_portable;
#if defined(LILY_X86)
  if (has_set("avx512"))
    lookup = limits::lookup_avx512;
  else if (has_set("avx2"))
    lookup = limits::lookup_avx2;
#endif
  return {double(limits::kLookupWords) * 8, [=](uint64_t rounds, uint32_t) {
            float table[16];
            for (int i = 0; i < 16; i++) table[i] = float(i) - 8;
            return double(lookup(reinterpret_cast<const uint32_t*>(memory->data.get()), table, rounds));
          }};
}

Loop fma_loop() {
#if defined(LILY_X86)
  if (has_set("avx512")) return {limits::kFmaOps512, [](uint64_t rounds, uint32_t) { return double(limits::fma_avx512(rounds)); }};
  if (has_set("avx2")) return {limits::kFmaOps256, [](uint64_t rounds, uint32_t) { return double(limits::fma_avx2(rounds)); }};
#endif
#if defined(LILY_ARM)
  return {limits::kFmaOps128, [](uint64_t rounds, uint32_t) { return double(limits::fma_neon(rounds)); }};
#else
  return {limits::kFmaOps128, [](uint64_t rounds, uint32_t) { return double(limits::fma_portable(rounds)); }};
#endif
}

Loop loop_for(const LimitRequest& request) {
  const auto kinds = limit_kinds();
  if (std::find(kinds.begin(), kinds.end(), request.kind) == kinds.end()) throw InvalidArgument("limit '" + request.kind + "' cannot be measured on this machine");
  if (request.kind == "read" || request.kind == "lookup") {
    const uint64_t least = request.kind == "read" ? uint64_t(request.threads) * limits::kLineBytes : limits::kLookupWords * 4;
    auto memory = std::make_shared<Memory>(std::max(request.bytes / limits::kLineBytes * limits::kLineBytes, least));
    uint32_t x = 0x9e3779b9u;  // pages that were never written would all be one page
    for (uint64_t i = 0; i < memory->bytes; i += 4) {
      x = x * 1664525u + 1013904223u;
      std::memcpy(memory->data.get() + i, &x, 4);
    }
    return request.kind == "read" ? read_loop(memory, request.threads) : lookup_loop(memory);
  }
#if defined(LILY_X86)
  if (request.kind == "int8") return {limits::kInt8Ops, [](uint64_t rounds, uint32_t) { return double(limits::int8_vnni(rounds)); }};
  if (request.kind == "amx_bf16") return {limits::kAmxBf16Ops, [](uint64_t rounds, uint32_t) { return double(limits::amx(rounds, false)); }};
  if (request.kind == "amx_int8") return {limits::kAmxInt8Ops, [](uint64_t rounds, uint32_t) { return double(limits::amx(rounds, true)); }};
#endif
  return fma_loop();
}

}  // namespace

std::vector<std::string> limit_kinds() {
  std::vector<std::string> kinds{"read", "lookup", "fma"};
#if defined(LILY_X86)
  if (has_vnni()) kinds.push_back("int8");
  if (has_amx()) kinds.insert(kinds.end(), {"amx_bf16", "amx_int8"});
#endif
  return kinds;
}

std::vector<LimitWindow> measure_limit(const LimitRequest& request) {
  if (request.threads < 1 || request.threads > 1024) throw InvalidArgument("threads is " + std::to_string(request.threads) + ", expected 1 to 1024");
  if (request.windows < 1 || !(request.seconds > 0 && request.seconds < 60)) throw InvalidArgument("expected at least one window of more than 0 and less than 60 seconds");
  using Clock = std::chrono::steady_clock;
  const Loop loop = loop_for(request);
  ThreadPool pool(request.threads);
  std::atomic<double> sink{0};
  std::vector<double> ran(request.threads);
  auto timed = [&](uint64_t rounds) {
    auto begin = Clock::now();
    pool.run(uint32_t(request.threads), [&](uint32_t i) {
      const double start = thread_seconds();
      sink.store(loop.run(rounds, i), std::memory_order_relaxed);
      ran[i] = thread_seconds() - start;
    });
    return std::chrono::duration<double>(Clock::now() - begin).count();
  };
  // As many rounds as fill a window; the search warms everything up as well.
  uint64_t rounds = 1;
  for (double took = timed(rounds); took < request.seconds; took = timed(rounds))
    rounds = took * 4 < request.seconds ? rounds * 4 : uint64_t(double(rounds) * (request.seconds / took) * 1.1) + 1;
  std::vector<LimitWindow> found;
  for (int w = 0; w < request.windows; w++) {
    const double work = loop.work * double(rounds), took = timed(rounds);
    LimitWindow window{work * request.threads / took, 0};
    for (double seconds : ran) window.running += work / std::max(seconds, 1e-9);
    found.push_back(window);
  }
  return found;
}

}  // namespace lily
