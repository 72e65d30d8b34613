// How long a dispatch takes at most, from its shapes: what a device needs to keep each command buffer short.
#pragma once
#include "device/dispatch.hpp"

namespace lily {

struct Work {
  double operations = 0;  // multiplications and additions
  double bytes = 0;
  double steps = 0;       // one after the other, each waiting for the last
};

// Counted as if every row of the program's bucket were live.
Work estimate_work(const Dispatch& dispatch);

// On the slowest GPU that is supported (M1 with seven cores), and below its measured peers: 0.5 TFLOP/s, 30 GB/s, 5 us a dispatch, 2 us a step.
double estimate_seconds(const Dispatch& dispatch);
// Of each stage: its dispatches one after the other.
std::vector<double> estimate_stages(const std::vector<Dispatch>& dispatches, const Stages& stages);

}  // namespace lily
