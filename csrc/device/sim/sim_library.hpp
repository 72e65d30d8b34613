// The simulator library behind LILY_SIM: opened at run time, one context per storage.
#pragma once
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/dtype.hpp"
#include "device/dispatch.hpp"
#include "device/shader/launch.hpp"
#include "device/shader/sim_abi.h"

namespace lily {

// A bound range of memory, in the order of the dispatch's uses; null data: not bound.
struct SimRange {
  uint8_t* data = nullptr;
  uint64_t bytes = 0;
};

class SimLibrary {
 public:
  // DeviceError when LILY_SIM is not set, cannot be opened, or was built for another version.
  static std::shared_ptr<SimLibrary> open(DType storage);
  ~SimLibrary();

  void barrier();
  // Runs one dispatch; DeviceError with the simulator's message.
  void launch(const Dispatch& dispatch, const Launch& launch, const std::vector<SimRange>& ranges, const std::vector<std::string>& names);
  void set(bool checking, uint64_t seed, bool counting);
  const LilySimCounters* counters();
  std::vector<std::string> functions();

 private:
  SimLibrary() = default;
  void* handle_ = nullptr;
  void* context_ = nullptr;
  decltype(&lily_sim_close) close_ = nullptr;
  decltype(&lily_sim_set) set_ = nullptr;
  decltype(&lily_sim_barrier) barrier_ = nullptr;
  decltype(&lily_sim_launch) launch_ = nullptr;
  decltype(&lily_sim_counters) counters_ = nullptr;
  decltype(&lily_sim_functions) functions_ = nullptr;
};

}  // namespace lily
