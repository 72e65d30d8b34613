// Counts what the simdgroups of a launch move: the accesses that the 32 lanes make with one instruction are one simdgroup access.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "../../csrc/device/shader/sim_abi.h"
#include "runtime.hpp"

namespace lily_sim {

class Traffic {
 public:
  void begin_launch(const LilySimLaunch& launch);
  void log(uint32_t simd, uint32_t lane, uint32_t buffer, uint64_t offset, uint32_t bytes, bool write, const void* site);
  // All lanes of the simdgroup are at one point: what they did since the last one is complete.
  void simdgroup_met(uint32_t simd);
  void end_threadgroup(uint32_t simds);
  void finish(LilySimCounters& counters) const;

 private:
  struct Access {
    uint64_t site;
    uint64_t offset;
    uint32_t bytes;
    uint16_t buffer;
    bool write;
  };
  struct Totals {
    std::string name;
    uint64_t size = 0;
    uint64_t read = 0, written = 0, transactions = 0;
    std::vector<uint64_t> read_bits, written_bits;
  };
  void count(const Access* const* group, uint32_t n);
  std::vector<Access> logs_[kMaxThreads / kSimdWidth][kSimdWidth];
  std::vector<Totals> totals_;
};

}  // namespace lily_sim
