// What is private to the runtime: one operating-system thread's fibres, the launch that it works on, and the shared error.
#pragma once
#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "../../csrc/device/shader/sim_abi.h"
#include "runtime.hpp"

namespace lily_sim {

class Checker;

struct ThreadgroupArray {
  const void* key;
  const char* name;
  char* data;
  size_t bytes;
};

struct LaunchState {
  const LilySimLaunch* launch = nullptr;
  const KernelEntry* kernel = nullptr;
  void* buffers[kMaxBuffers] = {};
  uint64_t seed = 0;
  Checker* checker = nullptr;  // null: run unchecked
  std::atomic<bool> failed{false};
  std::atomic<uint64_t> barriers{0};
  uint32_t threadgroup_bytes = 0;
  std::string error;  // of the first failure
};

struct Worker {
  LaunchState* state = nullptr;
  Lane* lane = nullptr;
  Context main;
  Stacks stacks;
  Lane lanes[kMaxThreads];
  Simd simds[kMaxThreads / kSimdWidth];
  uint32_t n_simds = 0;
  uint32_t waiting = 0;  // simdgroups at the threadgroup barrier
  uint32_t done = 0;
  const void* barrier_site = nullptr;
  uint32_t barrier_flags = 0;
  Uint3 group{0, 0, 0};
  uint32_t group_index = 0;
  uint64_t barriers = 0;
  bool failed = false;
  std::vector<ThreadgroupArray> arrays;
  uint32_t array_bytes = 0;
  std::unique_ptr<char[]> arena{new char[kThreadgroupLimit + 4096]};

  // Runs one threadgroup to its end; false when it failed.
  bool run(Uint3 group, uint32_t group_index);
  void begin_launch(LaunchState* launch_state);
};

// "metal/decode/gemv.metal:42", or an empty string.
std::string source_line(const void* site);
// Memory of this library itself: tables of constants.
bool in_library(const void* address);

}  // namespace lily_sim
