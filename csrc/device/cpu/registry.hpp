// The kernel tables of the instruction sets this build holds.
#pragma once
#include "device/cpu/kernel.hpp"

namespace lily::cpu {
namespace portable {
KernelFn find_kernel(const char* name, bool float32);
uint32_t kernel_names(const char** names, uint32_t capacity);
}  // namespace portable
#if defined(LILY_X86)
namespace avx2 {
KernelFn find_kernel(const char* name, bool float32);
}
namespace avx512 {
KernelFn find_kernel(const char* name, bool float32);
}
namespace amx {  // the matrix products of prefill alone
KernelFn find_kernel(const char* name, bool float32);
}
namespace amx_emulated {  // the same on vectors
KernelFn find_kernel(const char* name, bool float32);
}
#endif
#if defined(LILY_ARM)
namespace neon {
KernelFn find_kernel(const char* name, bool float32);
}
#endif
}  // namespace lily::cpu
