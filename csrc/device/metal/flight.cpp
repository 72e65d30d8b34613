#include "device/metal/flight.hpp"

#include <algorithm>

namespace lily::metal {

void Pace::learn(double estimated, double measured) {
  if (!(estimated > 0) || !(measured > 0) || (estimated < 1e-3 && measured < 1e-3)) return;  // too short to tell
  const double ratio = std::clamp(measured / estimated, 1.0 / 64, 1e6);
  scale_ = ratio > scale_ ? ratio : 0.75 * scale_ + 0.25 * ratio;
}

size_t Pace::cut(const MetalProgram& program, size_t begin) const {
  size_t end = begin + 1;
  double seconds = program.seconds[begin] * scale_;
  for (; end < program.seconds.size(); end++) {
    seconds += program.seconds[end] * scale_;
    if (seconds > slice_) break;
  }
  return end;
}

}  // namespace lily::metal
