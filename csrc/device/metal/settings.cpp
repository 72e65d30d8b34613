#include "device/metal/settings.hpp"

#include <cmath>
#include <cstdlib>
#include <string>

#include "base/error.hpp"

namespace lily::metal {
namespace {

// The index of the value among the choices; 0 when the variable is not set.
int choice(const char* name, std::initializer_list<const char*> choices) {
  const char* text = std::getenv(name);
  if (!text || !*text) return 0;
  int i = 0;
  std::string names;
  for (const char* c : choices) {
    if (std::string(text) == c) return i;
    names += (i++ ? ", " : "") + std::string(c);
  }
  throw DeviceError(std::string(name) + " is '" + text + "', expected one of: " + names);
}

double seconds(const char* name, double value, double least, double most) {
  const char* text = std::getenv(name);
  if (!text || !*text) return value;
  char* end = nullptr;
  const double v = std::strtod(text, &end);
  if (*end || !(v >= least && v <= most)) throw DeviceError(std::string(name) + " is '" + text + "', expected seconds from " + std::to_string(least) + " to " + std::to_string(most));
  return v;
}

}  // namespace

Settings Settings::from_environment() {
  Settings s;
  s.concurrent = choice("LILY_METAL_ENCODER", {"concurrent", "serial"}) == 0;
  s.in_flight = choice("LILY_METAL_IN_FLIGHT", {"2", "1"}) == 0 ? 2 : 1;
  s.slice = seconds("LILY_METAL_SLICE", s.slice, 1e-6, 1);
  s.timeout = seconds("LILY_METAL_TIMEOUT", s.timeout, 0.01, 86400);
  s.tensor = Tensor(choice("LILY_METAL_TENSOR", {"auto", "on", "off"}));
  s.host_grids = choice("LILY_INDIRECT", {"device", "host"}) == 1;
  return s;
}

}  // namespace lily::metal
