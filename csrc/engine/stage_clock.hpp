// Seconds of each stage of the submissions made while a clock is on, by program.
#pragma once
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "device/device.hpp"
#include "graph/program.hpp"

namespace lily {

struct TimedProgram {
  std::string kind;  // "decode", "sampler", "prefill", "head_rows" or "head_step"
  uint32_t rows;     // prefill and heads: row bucket; decode: context tokens
  Program program;
  Stages stages;
  std::vector<std::vector<double>> seconds;  // [runs][stages]
};

class StageClock {
 public:
  void add(const PreparedPtr& program, const std::vector<double>& seconds) {
    std::lock_guard<std::mutex> lock(mutex_);
    runs_[program].push_back(seconds);
  }
  std::map<PreparedPtr, std::vector<std::vector<double>>> take() {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::move(runs_);
  }

 private:
  std::mutex mutex_;
  std::map<PreparedPtr, std::vector<std::vector<double>>> runs_;
};

}  // namespace lily
