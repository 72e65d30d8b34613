#include "runtime.hpp"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <initializer_list>

#include "checker.hpp"
#include "worker.hpp"

namespace lily_sim {

thread_local Worker* worker __attribute__((tls_model("initial-exec"))) = nullptr;

Lane& lane() { return *worker->lane; }
uint32_t threads_of_threadgroup() { return worker->n_simds * kSimdWidth; }

namespace {

std::vector<KernelEntry>& kernels() {
  static std::vector<KernelEntry> all;
  return all;
}

void switch_to(Worker& w, Lane* to) {
  Lane* from = w.lane;
  w.lane = to;
  switch_context(&from->context, &to->context);
}

[[noreturn]] void fail_with(const std::string& text) {
  Worker& w = *worker;
  LaunchState& state = *w.state;
  if (!state.failed.exchange(true)) state.error = text;
  w.failed = true;
  switch_context(&w.lane->context, &w.main);
  __builtin_unreachable();
}

std::string where() {
  const Worker& w = *worker;
  char text[160];
  std::snprintf(text, sizeof text, "thread %u of threadgroup (%u,%u,%u): ", w.lane->thread, w.group.x, w.group.y, w.group.z);
  return text;
}

std::string formatted(const char* format, va_list list) {
  char text[1024];
  std::vsnprintf(text, sizeof text, format, list);
  return text;
}

std::string place(const Worker& w, const void* site) {
  std::string text = std::string(" [kernel ") + w.state->kernel->function;
  const std::string line = source_line(site);
  if (!line.empty()) text += ", " + line;
  if (w.state->launch->label && *w.state->launch->label) text += std::string(", ") + w.state->launch->label;
  return text + "]";
}

// A small generator for orders; equal on every machine.
struct Random {
  uint64_t state;
  uint64_t next() {
    state += 0x9E3779B97F4A7C15u;
    uint64_t z = state;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
};

void shuffle(uint32_t* order, uint32_t n, Random& random) {
  for (uint32_t i = n; i > 1; i--) std::swap(order[i - 1], order[random.next() % i]);
}

uint64_t number(const void* p) { return reinterpret_cast<uintptr_t>(p); }

void mix(uint64_t& flow, std::initializer_list<uint64_t> parts) {
  for (const uint64_t part : parts) flow = (flow ^ part) * 0x9E3779B97F4A7C15u + 1;
}

void compare_group_flow(const Worker& w, const void* site) {
  for (uint32_t k = 1; k < w.n_simds; k++)
    if (w.simds[k].group_flow != w.simds[0].group_flow) fail_at(site, "divergence: simdgroups 0 and %u did not run the same matmul2d operations", k);
}

// A lane returned from the kernel: the last event of its simdgroup.
[[noreturn]] void leave() {
  Worker& w = *worker;
  if (arrive("the end of the kernel", nullptr, 0)) {
    Simd& s = *w.lane->simd;
    s.done = true;
    if (++w.done == w.n_simds) {
      compare_group_flow(w, nullptr);
      switch_context(&w.lane->context, &w.main);
    } else {
      if (w.waiting) fail_at(w.barrier_site, "simdgroup %u returned while %u simdgroups wait at threadgroup_barrier", s.index, w.waiting);
      Simd* next = s.next;
      while (next->done) next = next->next;
      switch_to(w, next->resume);
    }
  }
  __builtin_unreachable();
}

void lane_main() {
  Worker& w = *worker;
  const Lane& l = *w.lane;
  const LaunchState& state = *w.state;
  const LilySimLaunch& launch = *state.launch;
  Invocation call;
  std::memcpy(call.buffers, state.buffers, sizeof call.buffers);
  call.thread = l.thread;
  call.simd = l.thread / kSimdWidth;
  call.lane = l.index;
  call.position_in_threadgroup = {l.thread, 0, 0};
  call.threadgroup_position = w.group;
  call.threads_per_threadgroup = {launch.threads, 1, 1};
  call.threadgroups_per_grid = {launch.grid[0], launch.grid[1], launch.grid[2]};
  call.position_in_grid = {w.group.x * launch.threads + l.thread, w.group.y, w.group.z};
  state.kernel->invoke(call);
  leave();
}

}  // namespace

bool register_kernel(const KernelEntry& entry) {
  kernels().push_back(entry);
  return true;
}

const KernelEntry* find_kernel(uint32_t storage, const char* function) {
  for (const KernelEntry& k : kernels())
    if (k.storage == storage && std::strcmp(k.function, function) == 0) return &k;
  return nullptr;
}

std::string kernel_names(uint32_t storage) {
  std::vector<std::string> names;
  for (const KernelEntry& k : kernels())
    if (k.storage == storage) names.push_back(k.function);
  std::sort(names.begin(), names.end());
  std::string text;
  for (const std::string& name : names) text += name + "\n";
  return text;
}

void fail(const char* format, ...) {
  va_list list;
  va_start(list, format);
  const std::string text = formatted(format, list);
  va_end(list);
  fail_with(where() + text + place(*worker, nullptr));
}

void fail_at(const void* site, const char* format, ...) {
  va_list list;
  va_start(list, format);
  const std::string text = formatted(format, list);
  va_end(list);
  fail_with(where() + text + place(*worker, site));
}

bool arrive(const char* what, const void* site, uint32_t operand) {
  Worker& w = *worker;
  Lane& l = *w.lane;
  Simd& s = *l.simd;
  if (s.arrived == 0) {
    s.what = what;
    s.site = site;
    s.operand = operand;
    s.first = l.index;
    s.flow = l.flow;
  } else if (s.site != site || s.operand != operand) {
    const std::string other = source_line(s.site);
    fail_at(site, "divergence in simdgroup %u: lane %u reached %s while lane %u reached %s%s%s%s%s", s.index, l.index, what, s.first, s.what, other.empty() ? "" : " (",
            other.c_str(), other.empty() ? "" : ")", s.site == site ? ", with a different operand" : "");
  }
  if (l.flow != s.flow) fail_at(site, "divergence in simdgroup %u: lanes %u and %u did not load and store the same simdgroup matrices before %s", s.index, l.index, s.first, what);
  l.flow = 0;
  if (++s.arrived == kSimdWidth) {
    s.arrived = 0;
    if (w.state->checker) w.state->checker->lanes_met(w, s);
    return true;
  }
  switch_to(w, l.next);
  return false;
}

void note_flow(const void* site, const void* address, uint64_t operand) { mix(worker->lane->flow, {number(site), number(address), operand}); }

void note_group_flow(const void* site, const void* first, const void* second) {
  const Lane& l = *worker->lane;
  if (l.index == 0) mix(l.simd->group_flow, {number(site), number(first), number(second)});
}

void threadgroup_barrier(uint32_t flags, const void* site) {
  if (!arrive("threadgroup_barrier", site, flags)) return;
  Worker& w = *worker;
  Simd& s = *w.lane->simd;
  if (w.waiting == 0) {
    w.barrier_site = site;
    w.barrier_flags = flags;
  } else if (w.barrier_site != site || w.barrier_flags != flags) {
    const std::string other = source_line(w.barrier_site);
    fail_at(site, "divergence: simdgroup %u reached a threadgroup_barrier while other simdgroups wait at another one (%s)", s.index, other.c_str());
  }
  if (w.done) fail_at(site, "simdgroup %u waits at threadgroup_barrier while %u simdgroups returned", s.index, w.done);
  if (++w.waiting == w.n_simds) {
    compare_group_flow(w, site);
    w.waiting = 0;
    w.barriers++;
    if (w.state->checker) w.state->checker->threadgroup_barrier(flags);
    return;
  }
  s.resume = w.lane;
  switch_to(w, s.next->resume);
}

void simdgroup_barrier(uint32_t flags, const void* site) {
  if (!arrive("simdgroup_barrier", site, flags)) return;
  Simd& s = *worker->lane->simd;
  if (flags & kMemoryDevice) s.device_epoch++;
  if (flags & kMemoryThreadgroup) s.threadgroup_epoch++;
}

void* threadgroup_array(const void* key, const char* name, size_t bytes, size_t alignment, const void* site) {
  Worker& w = *worker;
  for (const ThreadgroupArray& a : w.arrays)
    if (a.key == key) return a.data;
  alignment = std::max<size_t>(alignment, 16);
  w.array_bytes = uint32_t((w.array_bytes + alignment - 1) / alignment * alignment + bytes);
  if (w.array_bytes > kThreadgroupLimit) fail_at(site, "threadgroup memory: %u bytes with '%s', at most %u", w.array_bytes, name, kThreadgroupLimit);
  char* data = w.state->checker ? w.state->checker->add_threadgroup_array(uint32_t(w.arrays.size()), name, bytes, site) : w.arena.get() + (w.array_bytes - bytes);
  w.arrays.push_back({key, name, data, bytes});
  std::memset(data, 0xFF, bytes);
  return data;
}

void Worker::begin_launch(LaunchState* launch_state) {
  state = launch_state;
  arrays.clear();
  array_bytes = 0;
  barriers = 0;
  failed = false;
  n_simds = launch_state->launch->threads / kSimdWidth;
}

bool Worker::run(Uint3 position, uint32_t index) {
  group = position;
  group_index = index;
  waiting = done = 0;
  for (const ThreadgroupArray& a : arrays) std::memset(a.data, 0xFF, a.bytes);
  uint32_t order[kSimdWidth], simd_order[kMaxThreads / kSimdWidth];
  for (uint32_t i = 0; i < kSimdWidth; i++) order[i] = i;
  for (uint32_t i = 0; i < n_simds; i++) simd_order[i] = i;
  Random random{state->seed * 0x2545F4914F6CDD1Du + index};
  if (state->seed) shuffle(simd_order, n_simds, random);
  for (uint32_t k = 0; k < n_simds; k++) {
    Simd& s = simds[k];
    s.index = k;
    s.arrived = 0;
    s.done = false;
    s.group_flow = 0;
    s.device_epoch = s.threadgroup_epoch = 0;
    if (state->seed) shuffle(order, kSimdWidth, random);
    for (uint32_t i = 0; i < kSimdWidth; i++) {
      const uint32_t thread = k * kSimdWidth + order[i];
      Lane& l = lanes[thread];
      l.simd = &s;
      l.thread = thread;
      l.index = order[i];
      l.flow = 0;
      l.next = &lanes[k * kSimdWidth + order[(i + 1) % kSimdWidth]];
      stacks.mark(thread);
      prepare_context(&l.context, stacks.low(thread), stacks.high(thread), lane_main);
    }
    s.resume = &lanes[k * kSimdWidth + order[0]];
  }
  for (uint32_t k = 0; k < n_simds; k++) simds[simd_order[k]].next = &simds[simd_order[(k + 1) % n_simds]];
  if (state->checker) state->checker->begin_threadgroup(*this);
  lane = simds[simd_order[0]].resume;
  switch_context(&main, &lane->context);
  for (uint32_t i = 0; i < n_simds * kSimdWidth && !failed; i++) {
    if (!stacks.overflowed(i)) continue;
    if (!state->failed.exchange(true))
      state->error = std::string("private memory of a thread exceeds ") + std::to_string(Stacks::kBytes) + " bytes [kernel " + state->kernel->function + "]";
    failed = true;
  }
  return !failed;
}

}  // namespace lily_sim
