// How a launch runs: each Metal thread (lane) is a fibre; the 32 lanes of a simdgroup form a ring and meet at collectives.
// Included by the shims, hence seen by every kernel.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "fiber.hpp"

namespace lily_sim {

constexpr unsigned kSimdWidth = 32;
constexpr unsigned kMaxThreads = 1024;
constexpr unsigned kMaxBuffers = 22;  // 20: arguments, 21: mask of bound buffers
constexpr unsigned kThreadgroupLimit = 32768;

enum MemoryFlags : uint32_t { kMemoryNone = 0, kMemoryDevice = 1, kMemoryThreadgroup = 2 };
enum AccessKind : uint32_t { kRead = 0, kWrite = 1, kAtomicRead = 2, kAtomicWrite = 3, kAtomicUpdate = 4 };

struct Uint3 {
  uint32_t x, y, z;
};

struct Simd;
struct Lane {
  Context context;
  Lane* next = nullptr;  // in the ring of its simdgroup
  Simd* simd = nullptr;
  uint32_t thread = 0;  // in the threadgroup
  uint32_t index = 0;   // in the simdgroup
  uint64_t flow = 0;    // what it did since the last collective that the whole simdgroup must do alike
};

struct Simd {
  // What the lanes bring and what they take are apart: the last lane may bring its next operand before the others took their results.
  alignas(16) char in[kSimdWidth][64];
  alignas(16) char out[kSimdWidth][64];
  uint32_t arrived = 0;
  const char* what = nullptr;  // the collective that the first arrival named
  const void* site = nullptr;
  uint32_t operand = 0;
  uint32_t first = 0;
  uint64_t flow = 0;
  Lane* resume = nullptr;  // where the simdgroup goes on when it is its turn
  Simd* next = nullptr;    // ring of simdgroups
  uint32_t index = 0;
  bool done = false;
  uint64_t group_flow = 0;
  uint32_t device_epoch = 0, threadgroup_epoch = 0;  // simdgroup barriers passed
};

// What a launch runs on one operating-system thread.
struct Worker;
extern thread_local Worker* worker __attribute__((tls_model("initial-exec")));
Lane& lane();

// The lane brings nothing more; true for the last of its simdgroup, which computes what the others take.
// Every lane must come with the same site and operand.
// Convergent: the compiler must not copy a call into several branches, for the place of the call tells which collective it is. The
// functions of the shims inherit this only from what they call.
#define LILY_CONVERGENT __attribute__((convergent))
LILY_CONVERGENT bool arrive(const char* what, const void* site, uint32_t operand);
LILY_CONVERGENT void threadgroup_barrier(uint32_t flags, const void* site);
LILY_CONVERGENT void simdgroup_barrier(uint32_t flags, const void* site);
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));
// The same with the place in the kernel's source.
[[noreturn]] void fail_at(const void* site, const char* format, ...) __attribute__((format(printf, 2, 3)));

// The threadgroup array that belongs to `key`, the same for every thread of a threadgroup; filled with NaN at its start.
void* threadgroup_array(const void* key, const char* name, size_t bytes, size_t alignment, const void* site);

// Shims run uninstrumented: they say themselves what kernel memory they touch.
void touch(const void* address, size_t bytes, uint32_t kind, const void* site, unsigned alignment);

// A simdgroup's load or store: no meeting, but at the next collective all lanes must have done the same.
void note_flow(const void* site, const void* address, uint64_t operand);
// What all simdgroups of a threadgroup do alike: compared at the next threadgroup barrier and at the end.
void note_group_flow(const void* site, const void* first, const void* second);

uint32_t threads_of_threadgroup();
bool scrambled_layout();

// One published kernel.
struct Invocation {
  void* buffers[kMaxBuffers];
  Uint3 position_in_grid, position_in_threadgroup, threadgroup_position, threads_per_threadgroup, threadgroups_per_grid;
  uint32_t thread, simd, lane;
};
struct KernelEntry {
  const char* function;
  const char* file;
  int line;
  uint32_t storage;
  void (*invoke)(const Invocation&);
  uint32_t buffers;  // mask of the buffer indices that it takes
};
bool register_kernel(const KernelEntry& entry);
const KernelEntry* find_kernel(uint32_t storage, const char* function);

}  // namespace lily_sim
