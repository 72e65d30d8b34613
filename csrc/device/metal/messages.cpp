#include "device/metal/messages.hpp"

#include <cstdlib>
#include <dlfcn.h>

namespace lily::metal {

std::string text_of(const Messages& m, Object string) {
  const char* text = string ? m.text(string) : nullptr;
  return text ? text : "";
}

std::string describe(const Messages& m, Object error) {
  if (!error) return "no reason was given";
  return text_of(m, m.error_description(error)) + " (" + text_of(m, m.error_domain(error)) + " code " + std::to_string(m.error_code(error)) + ")";
}

#if !defined(__APPLE__)
// A stand-in that records messages and runs command buffers on the simulator, for tests: part of the simulator's library.
const Messages* messages(std::string* reason) {
  const char* path = std::getenv("LILY_SIM");
  std::string why = "Metal needs macOS 14 or later";
  const Messages* found = nullptr;
  if (path && *path) {
    using Open = const Messages* (*)(uint32_t version);
    void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    auto open = library ? reinterpret_cast<Open>(dlsym(library, "lily_metal_standin")) : nullptr;
    if (open) found = open(kMessagesVersion);
    if (!found) why += "; the library that LILY_SIM names has no stand-in for it, or one of another version: build it anew with python -m tests.sim build";
  }
  if (!found && reason) *reason = why;
  return found;
}
#endif

}  // namespace lily::metal
