// The C interface of the library.
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <thread>

#include "checker.hpp"
#include "worker.hpp"

namespace lily_sim {
std::string kernel_names(uint32_t storage);
// Function constants by index: one set for the process, because launches run one at a time.
void set_constants(const uint32_t* values, uint32_t n);
static bool scrambled = false;
bool scrambled_layout() { return scrambled; }
}  // namespace lily_sim

namespace {

using namespace lily_sim;

struct SimContext {
  uint32_t storage = 0;
  bool checking = true, counting = false;
  uint64_t seed = 0;
  std::unique_ptr<Checker> checker;
  std::vector<std::unique_ptr<Worker>> workers;
  LilySimCounters counters{};
  std::string names;
};

std::mutex& launch_mutex() {
  static std::mutex m;
  return m;
}

unsigned thread_count() {
  const char* text = std::getenv("LILY_THREADS");
  const int n = text ? std::atoi(text) : int(std::thread::hardware_concurrency());
  return n < 1 ? 1u : n > 64 ? 64u : unsigned(n);
}

uint64_t mixed(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// The order of threadgroups: ascending, or from the seed an affine walk over all of them.
struct Order {
  uint64_t n, start = 0, step = 1;
  Order(uint64_t count, uint64_t seed) : n(count) {
    if (!seed || n < 2) return;
    start = mixed(seed) % n;
    step = mixed(seed + 1) % n;
    auto gcd = [](uint64_t a, uint64_t b) {
      while (b) {
        const uint64_t t = a % b;
        a = b;
        b = t;
      }
      return a;
    };
    while (step == 0 || gcd(step, n) != 1) step = step + 1 < n ? step + 1 : 1;
  }
  uint64_t at(uint64_t i) const { return (start + static_cast<unsigned __int128>(i) * step) % n; }
};

void run_groups(LaunchState& state, Worker& w, const Order& order, std::atomic<uint64_t>& next) {
  worker = &w;
  w.begin_launch(&state);
  const uint32_t* grid = state.launch->grid;
  for (uint64_t i; !state.failed && (i = next.fetch_add(1)) < order.n;) {
    const uint64_t g = order.at(i);
    const Uint3 position{uint32_t(g % grid[0]), uint32_t(g / grid[0] % grid[1]), uint32_t(g / grid[0] / grid[1])};
    if (!w.run(position, uint32_t(g))) break;
    if (state.checker) state.checker->end_threadgroup(w);
  }
  worker = nullptr;
  state.barriers += w.barriers;
}

int report(const std::string& message, char* error, uint64_t error_bytes) {
  if (error && error_bytes) std::snprintf(error, error_bytes, "%s", message.c_str());
  return 1;
}

}  // namespace

extern "C" {
#define LILY_EXPORT __attribute__((visibility("default")))

LILY_EXPORT uint32_t lily_sim_abi(void) { return LILY_SIM_ABI; }

LILY_EXPORT void* lily_sim_open(uint32_t storage) {
  const std::string names = kernel_names(storage);
  if (names.empty()) return nullptr;
  auto* c = new SimContext;
  c->storage = storage;
  c->names = names;
  return c;
}

LILY_EXPORT void lily_sim_close(void* context) { delete static_cast<SimContext*>(context); }

LILY_EXPORT void lily_sim_set(void* context, uint32_t checking, uint64_t seed, uint32_t counting) {
  auto* c = static_cast<SimContext*>(context);
  c->checking = checking != 0;
  c->counting = counting != 0;
  c->seed = seed;
}

LILY_EXPORT void lily_sim_barrier(void* context) {
  auto* c = static_cast<SimContext*>(context);
  if (c->checker) c->checker->encoder_barrier();
}

LILY_EXPORT int lily_sim_launch(void* context, const LilySimLaunch* launch, char* error, uint64_t error_bytes) {
  auto* c = static_cast<SimContext*>(context);
  std::lock_guard<std::mutex> lock(launch_mutex());
  const std::string name = launch->function;
  LaunchState state;
  state.launch = launch;
  state.seed = c->seed;
  state.kernel = find_kernel(c->storage, launch->function);
  if (!state.kernel) return report("no kernel is called '" + name + "'", error, error_bytes);
  if (launch->threads == 0 || launch->threads > kMaxThreads || launch->threads % kSimdWidth)
    return report("threads per threadgroup: " + std::to_string(launch->threads) + ", expected a multiple of 32 up to 1024 [kernel " + name + "]", error, error_bytes);
  const uint64_t groups = uint64_t(launch->grid[0]) * launch->grid[1] * launch->grid[2];
  if (groups > UINT32_MAX) return report("more than 2^32 threadgroups [kernel " + name + "]", error, error_bytes);
  set_constants(launch->constants, launch->n_constants);
  const char* scramble = std::getenv("LILY_SIM_SCRAMBLE");
  scrambled = scramble && *scramble && *scramble != '0';

  const Order order(groups, c->seed);
  std::atomic<uint64_t> next{0};
  c->counters = LilySimCounters{};
  if (c->workers.empty()) c->workers.push_back(std::make_unique<Worker>());
  Worker* caller = worker;
  if (c->checking || c->counting) {
    if (!c->checker) c->checker = std::make_unique<Checker>();
    c->checker->checking = c->checking;
    c->checker->counting = c->counting;
    state.checker = c->checker.get();
    const std::string wrong = c->checker->begin_launch(state);
    if (!wrong.empty()) return report(wrong + " [kernel " + name + "]", error, error_bytes);
    active_checker = c->checker.get();
    if (groups) run_groups(state, *c->workers[0], order, next);
    active_checker = nullptr;
    c->checker->end_launch(state, c->counters);
  } else if (groups) {
    for (unsigned i = 0; i < launch->n_buffers && i < 20; i++) state.buffers[i] = launch->buffers[i].data;
    uint32_t present = launch->present;
    state.buffers[20] = const_cast<void*>(launch->args);
    state.buffers[21] = &present;
    const unsigned n = unsigned(std::min<uint64_t>(thread_count(), groups));
    while (c->workers.size() < n) c->workers.push_back(std::make_unique<Worker>());
    std::vector<std::thread> threads;
    for (unsigned t = 1; t < n; t++) threads.emplace_back([&, t] { run_groups(state, *c->workers[t], order, next); });
    run_groups(state, *c->workers[0], order, next);
    for (std::thread& t : threads) t.join();
  }
  worker = caller;
  c->counters.threadgroups = groups;
  c->counters.barriers = state.barriers;
  c->counters.threadgroup_bytes = c->workers[0]->array_bytes;
  if (state.failed) return report(state.error, error, error_bytes);
  return 0;
}

LILY_EXPORT const LilySimCounters* lily_sim_counters(void* context) { return &static_cast<SimContext*>(context)->counters; }

LILY_EXPORT const char* lily_sim_functions(void* context) { return static_cast<SimContext*>(context)->names.c_str(); }
}
