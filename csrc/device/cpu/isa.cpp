// Which variant runs a kernel: the best of this machine, or what LILY_KERNEL forces.
#include <algorithm>
#include <cstdlib>
#include <map>
#if defined(LILY_X86) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "base/error.hpp"
#include "device/cpu/cpu_device.hpp"
#include "device/cpu/registry.hpp"

namespace lily {
namespace {

#if defined(LILY_X86)
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

// The processor has bf16 tiles and the conversion to bf16, the system saves the tiles, and this process may use them: Linux grants that once, on request.
bool has_amx() {
#if defined(__linux__)
  constexpr unsigned kTile = 1u << 24, kBf16 = 1u << 22, kConversion = 1u << 5, kSaved = 3u << 17;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kTile) == 0 || (d & kBf16) == 0) return false;
  if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || (a & kConversion) == 0) return false;
  unsigned low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & kSaved) == kSaved && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#endif

std::vector<std::string> find_instruction_sets() {
  std::vector<std::string> found;
#if defined(LILY_X86)
  __builtin_cpu_init();
  if (has_avx512() && has_amx()) found.push_back("amx");
  if (has_avx512()) found.push_back("avx512");
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) found.push_back("avx2");
#endif
#if defined(LILY_ARM)
  found.push_back("neon");  // part of every 64-bit ARM processor
#endif
  found.push_back("portable");
  return found;
}

bool contains(const std::vector<std::string>& list, const std::string& item) { return std::find(list.begin(), list.end(), item) != list.end(); }

// The kernel of this variant alone; null when the variant has none of its own.
cpu::KernelFn own_kernel(const std::string& name, const std::string& isa, bool f32) {
#if defined(LILY_X86)
  if (isa == "amx") return cpu::amx::find_kernel(name.c_str(), f32);
  if (isa == "amx-emulated") return cpu::amx_emulated::find_kernel(name.c_str(), f32);
  if (isa == "avx512") return cpu::avx512::find_kernel(name.c_str(), f32);
  if (isa == "avx2") return cpu::avx2::find_kernel(name.c_str(), f32);
#endif
#if defined(LILY_ARM)
  if (isa == "neon") return cpu::neon::find_kernel(name.c_str(), f32);
#endif
  if (isa == "portable") return cpu::portable::find_kernel(name.c_str(), f32);
  return nullptr;
}

bool on_tiles(const std::string& isa) { return isa.starts_with("amx"); }

}  // namespace

const std::vector<std::string>& cpu_instruction_sets() {
  static const std::vector<std::string> found = find_instruction_sets();
  return found;
}

std::vector<std::string> cpu_variants() {
  std::vector<std::string> variants = cpu_instruction_sets();
  if (contains(variants, "avx512")) variants.push_back("amx-emulated");
  return variants;
}

cpu::KernelFn find_cpu_kernel(const std::string& name, const std::string& isa, DType storage) {
  if (!contains(cpu_variants(), isa)) throw InvalidArgument("instruction set '" + isa + "' is not available on this machine");
  const bool f32 = storage == DType::f32;
  cpu::KernelFn fn = own_kernel(name, isa, f32);
  if (!fn && on_tiles(isa)) fn = own_kernel(name, "avx512", f32);
  if (!fn) throw InvalidArgument("the cpu has no kernel named '" + name + "'");
  return fn;
}

std::vector<std::string> cpu_kernel_names() {
  const char* names[256];
  uint32_t n = cpu::portable::kernel_names(names, 256);
  return {names, names + n};
}

CpuChoice choose_cpu_kernel(const std::string& name) {
  const std::vector<std::string> variants = cpu_variants();
  // An instruction set is a whole one: where tiles have no kernel of their own, AVX-512 is theirs.
  auto choice_of = [&](const std::string& isa, const char* reason) -> CpuChoice {
    if (on_tiles(isa) && !own_kernel(name, isa, false)) return {"avx512", std::string(reason) + "; " + isa + " is for matrix products and attention of prefill"};
    return {isa, reason};
  };
  const char* forced = std::getenv("LILY_KERNEL");
  CpuChoice choice = choice_of(variants.front(), "best of this machine");
  if (!forced || !*forced) return choice;
  std::string text = forced;
  auto names = cpu_kernel_names();
  for (size_t start = 0; start <= text.size();) {
    size_t end = std::min(text.find(',', start), text.size());
    std::string item = text.substr(start, end - start);
    size_t eq = item.find('=');
    if (eq == std::string::npos) throw DeviceError("LILY_KERNEL: '" + item + "' is not of the form name=variant");
    std::string kernel = item.substr(0, eq), isa = item.substr(eq + 1);
    if (kernel != "*" && !contains(names, kernel)) throw DeviceError("LILY_KERNEL: no kernel named '" + kernel + "'");
    std::string legal;
    for (auto& variant : variants)
      if (kernel == "*" || own_kernel(kernel, variant, false)) legal += (legal.empty() ? "" : ", ") + variant;
    if (!contains(variants, isa) || (kernel != "*" && !own_kernel(kernel, isa, false)))
      throw DeviceError("LILY_KERNEL: variant '" + isa + "' of '" + kernel + "' is not available here; expected one of: " + legal);
    if (kernel == "*" || kernel == name) choice = choice_of(isa, "forced by LILY_KERNEL");
    start = end + 1;
  }
  return choice;
}

}  // namespace lily
