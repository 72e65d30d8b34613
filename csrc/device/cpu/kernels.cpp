// All kernels of one instruction set; compiled once per instruction set beside the kernel files.
#include "device/cpu/registry.hpp"
#include "device/cpu/simd.hpp"

#if defined(LILY_AMX)  // what differs from AVX-512
#undef LILY_KERNEL_FILES
#define LILY_KERNEL_FILES(X) X(gemm) X(moe_rows) X(attention_rows)
#endif

namespace lily::cpu::LILY_CPU_NS {

#define LILY_DECLARE(file) KernelList file##_kernels();
LILY_KERNEL_FILES(LILY_DECLARE)
#undef LILY_DECLARE

KernelFn find_kernel(const char* name, bool float32) {
  using Getter = KernelList (*)();
#define LILY_GETTER(file) &file##_kernels,
  static const Getter getters[] = {LILY_KERNEL_FILES(LILY_GETTER)};
#undef LILY_GETTER
  for (Getter get : getters) {
    KernelList list = get();
    for (uint32_t i = 0; i < list.count; i++) {
      const char *a = list.entries[i].name, *b = name;
      while (*a && *a == *b) a++, b++;
      if (*a == *b) return float32 ? list.entries[i].float32 : list.entries[i].bf16;
    }
  }
  return nullptr;
}

uint32_t kernel_names(const char** names, uint32_t capacity) {
  uint32_t n = 0;
#define LILY_LIST(file)                                                  \
  for (KernelList l = file##_kernels(); l.count; l.count--, l.entries++) \
    if (n < capacity) names[n++] = l.entries->name;
  LILY_KERNEL_FILES(LILY_LIST)
#undef LILY_LIST
  return n;
}

}  // namespace lily::cpu::LILY_CPU_NS
