#include "device/shader/launch.hpp"

namespace lily {

const std::vector<LaunchEntry>& prefill_launches() {
  static const std::vector<LaunchEntry> entries;
  return entries;
}

}  // namespace lily
