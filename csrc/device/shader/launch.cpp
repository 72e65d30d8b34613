#include "device/shader/launch.hpp"

#include <algorithm>
#include <cstdlib>

#include "base/error.hpp"

namespace lily {
namespace {

const LaunchEntry* find(const std::string& kernel) {
  for (const auto* list : {&decode_launches(), &prefill_launches(), &prefill_small_launches()})
    for (const LaunchEntry& e : *list)
      if (kernel == e.kernel) return &e;
  return nullptr;
}

}  // namespace

Tuning Tuning::from_environment() {
  Tuning t;
  const char* text = std::getenv("LILY_KERNEL");
  if (!text) return t;
  std::string s = text;
  for (size_t at = 0; at < s.size();) {
    size_t end = std::min(s.find(',', at), s.size());
    std::string item = s.substr(at, end - at);
    at = end + 1;
    size_t eq = item.find('=');
    if (eq == std::string::npos) throw DeviceError("LILY_KERNEL: '" + item + "' is not of the form name=variant");
    if (!find(item.substr(0, eq))) throw DeviceError("LILY_KERNEL: no kernel named '" + item.substr(0, eq) + "' has a Metal form");
    t.forced.emplace_back(item.substr(0, eq), item.substr(eq + 1));
  }
  return t;
}

const std::string* Tuning::variant(const std::string& kernel) const {
  for (const auto& [name, variant] : forced)
    if (name == kernel) return &variant;
  return nullptr;
}

Launch plan_launch(const Dispatch& d, const Tuning& tuning) {
  const LaunchEntry* e = find(d.kernel);
  if (!e) throw DeviceError("kernel '" + d.kernel + "' has no Metal form");
  const std::string* forced = tuning.variant(d.kernel);
  if (!forced) {
    for (const auto& [kernel, variant] : tuning.chosen)
      if (kernel == d.kernel) {
        Launch l = e->plan(d, &variant);
        l.reason = tuning.chosen_reason;
        return l;
      }
  }
  if (forced) {
    bool known = false;
    std::string names;
    for (const char* v : e->variants) known = known || *forced == v, names += (names.empty() ? "" : ", ") + std::string(v);
    if (!known) throw DeviceError("LILY_KERNEL asks for " + d.kernel + "=" + *forced + ", expected one of: " + (names.empty() ? "none, it has one form" : names));
  }
  return e->plan(d, forced);
}

std::vector<std::string> launch_kernels() {
  std::vector<std::string> names;
  for (const auto* list : {&decode_launches(), &prefill_launches(), &prefill_small_launches()})
    for (const LaunchEntry& e : *list) names.push_back(e.kernel);
  return names;
}

}  // namespace lily
