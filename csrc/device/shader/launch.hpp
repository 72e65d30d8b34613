// From a recorded dispatch to a launch of a Metal kernel: what the metal, cuda and sim devices share.
#pragma once
#include <array>
#include <string>
#include <vector>

#include "device/dispatch.hpp"

namespace lily {

constexpr uint32_t kArgsIndex = 20;     // buffer index of the argument struct
constexpr uint32_t kPresentIndex = 21;  // buffer index of the mask of bound buffers
constexpr uint32_t kMaxExperts = 512;   // route.h: 16 logits a lane

// What a policy or LILY_KERNEL=name=variant asks of the kernels; legality is checked when a launch is planned.
struct Tuning {
  std::vector<std::pair<std::string, std::string>> forced;  // kernel name, variant
  std::vector<std::pair<std::string, std::string>> chosen;  // by the device, where nothing is forced
  std::string chosen_reason;
  static Tuning from_environment();                         // LILY_KERNEL; DeviceError
  const std::string* variant(const std::string& kernel) const;  // what is forced
};

struct Launch {
  std::string function;                     // host name of LILY_INSTANTIATE
  std::vector<uint32_t> constants;          // function constants by index
  std::array<uint32_t, 3> grid{1, 1, 1};    // threadgroups; from the indirect buffer when the dispatch names one
  uint32_t threads = 32;                    // per threadgroup, a multiple of 32
  std::string reason;                       // why this variant
};

// DeviceError for a forced variant that does not exist or does not fit, or a kernel without a Metal form.
Launch plan_launch(const Dispatch& dispatch, const Tuning& tuning);

// One planner per kernel name, in the file of its family.
using LaunchPlanner = Launch (*)(const Dispatch&, const std::string* variant);
struct LaunchEntry {
  const char* kernel;
  LaunchPlanner plan;
  std::vector<const char*> variants;  // the names that may be forced
};
const std::vector<LaunchEntry>& decode_launches();         // launch_decode.cpp: decode and shared kernels
const std::vector<LaunchEntry>& prefill_launches();        // launch_prefill.cpp: matrix products and attention
const std::vector<LaunchEntry>& prefill_small_launches();  // launch_prefill_small.cpp: routing, DeltaNet, what is done row by row
std::vector<std::string> launch_kernels();  // every name with a Metal form

// W_FORMAT: affine bits, or 16, 17 and 32 for plain bf16, f16 and f32.
template <class Format>
uint32_t format_constant(const Format& f) {
  return f.kind == 0 ? f.bits : f.kind == 1 ? 16u : f.kind == 2 ? 17u : 32u;
}
template <class Args>
const Args& args_of(const Dispatch& d) {
  return *reinterpret_cast<const Args*>(d.args.data());
}

}  // namespace lily
