// Which instruction set runs a kernel: the best of this machine, or what LILY_KERNEL forces.
#include <algorithm>
#include <cstdlib>
#include <map>

#include "base/error.hpp"
#include "device/cpu/cpu_device.hpp"
#include "device/cpu/registry.hpp"

namespace lily {

std::vector<std::string> cpu_instruction_sets() {
  std::vector<std::string> found;
#if defined(LILY_X86)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
    found.push_back("avx512");
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) found.push_back("avx2");
#endif
#if defined(LILY_ARM)
  found.push_back("neon");  // part of every 64-bit ARM processor
#endif
  found.push_back("portable");
  return found;
}

cpu::KernelFn find_cpu_kernel(const std::string& name, const std::string& isa, DType storage) {
  bool f32 = storage == DType::f32;
  cpu::KernelFn fn = nullptr;
  auto sets = cpu_instruction_sets();
  if (std::find(sets.begin(), sets.end(), isa) == sets.end())
    throw InvalidArgument("instruction set '" + isa + "' is not available on this machine");
#if defined(LILY_X86)
  if (isa == "avx512") fn = cpu::avx512::find_kernel(name.c_str(), f32);
  if (isa == "avx2") fn = cpu::avx2::find_kernel(name.c_str(), f32);
#endif
#if defined(LILY_ARM)
  if (isa == "neon") fn = cpu::neon::find_kernel(name.c_str(), f32);
#endif
  if (isa == "portable") fn = cpu::portable::find_kernel(name.c_str(), f32);
  if (!fn) throw InvalidArgument("the cpu has no kernel named '" + name + "'");
  return fn;
}

std::vector<std::string> cpu_kernel_names() {
  const char* names[256];
  uint32_t n = cpu::portable::kernel_names(names, 256);
  return {names, names + n};
}

CpuChoice choose_cpu_kernel(const std::string& name) {
  auto sets = cpu_instruction_sets();
  const char* forced = std::getenv("LILY_KERNEL");
  CpuChoice choice{sets.front(), "best of this machine"};
  if (!forced || !*forced) return choice;
  std::string text = forced;
  auto names = cpu_kernel_names();
  for (size_t start = 0; start <= text.size();) {
    size_t end = std::min(text.find(',', start), text.size());
    std::string item = text.substr(start, end - start);
    size_t eq = item.find('=');
    if (eq == std::string::npos) throw DeviceError("LILY_KERNEL: '" + item + "' is not of the form name=variant");
    std::string kernel = item.substr(0, eq), isa = item.substr(eq + 1);
    if (kernel != "*" && std::find(names.begin(), names.end(), kernel) == names.end())
      throw DeviceError("LILY_KERNEL: no kernel named '" + kernel + "'");
    if (std::find(sets.begin(), sets.end(), isa) == sets.end()) {
      std::string legal;
      for (auto& s : sets) legal += (legal.empty() ? "" : ", ") + s;
      throw DeviceError("LILY_KERNEL: variant '" + isa + "' of '" + kernel + "' is not available here; expected one of: " + legal);
    }
    if (kernel == "*" || kernel == name) choice = {isa, "forced by LILY_KERNEL"};
    start = end + 1;
  }
  return choice;
}

}  // namespace lily
