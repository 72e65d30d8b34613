// What a CPU kernel is: a function that runs a range of a dispatch's threadgroups. Each kernel file is compiled once per
// instruction set (namespace LILY_CPU_NS), and once per activation storage through a template on Act.
#pragma once
#include <cstdint>

namespace lily::cpu {

struct KernelCall {
  const void* args;      // the struct of metal/include/args.h
  void* const* buffers;  // in the order of args.h; null for an absent buffer
  // Another range of the same dispatch for the thread that has finished one; null where there is none. Only for a kernel that makes something ready for a
  // range and can keep it; any other one is simply called again.
  bool (*next)(void* of, uint32_t* begin, uint32_t* end) = nullptr;
  void* of = nullptr;
};
inline __attribute__((always_inline)) bool next_range(const KernelCall& c, uint32_t& begin, uint32_t& end) { return c.next && c.next(c.of, &begin, &end); }

// Runs threadgroups [begin, end). Ranges of one dispatch run concurrently and in any order.
using KernelFn = void (*)(const KernelCall&, uint32_t begin, uint32_t end);

struct KernelEntry {
  const char* name;
  KernelFn bf16;     // activation storage bfloat16
  KernelFn float32;  // activation storage float32, weights unrounded
};

struct KernelList {
  const KernelEntry* entries;
  uint32_t count;
};

// One per kernel file and instruction set; kernels.cpp collects them.
#define LILY_KERNEL_FILES(X) X(embed) X(norm) X(gemv) X(moe) X(gemm) X(moe_rows) X(moe_route) X(gdn_step) X(gdn_rows) X(gdn_scan) X(attention_step) X(attention_rows) X(attention_twins) X(sampling)

template <class T>
inline __attribute__((always_inline)) const T& args(const KernelCall& c) {
  return *static_cast<const T*>(c.args);
}
template <class T>
inline __attribute__((always_inline)) T* buffer(const KernelCall& c, int i) {
  return static_cast<T*>(c.buffers[i]);
}

}  // namespace lily::cpu

#ifdef LILY_CPU_NS
// In a kernel file: LILY_KERNELS(norm, {"rmsnorm_rows", rmsnorm_rows<Bf16>, rmsnorm_rows<F32>}, ...)
#define LILY_KERNELS(file, ...)                                      \
  namespace lily::cpu::LILY_CPU_NS {                                 \
  KernelList file##_kernels() {                                      \
    static const KernelEntry entries[] = {__VA_ARGS__};              \
    return {entries, uint32_t(sizeof(entries) / sizeof(entries[0]))}; \
  }                                                                  \
  }
#endif
