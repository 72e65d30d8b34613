// What clang calls at every access to memory under -fsanitize=thread. The thread sanitizer itself is never linked.
#include <cstring>

#include "checker.hpp"

namespace lily_sim {

void touch(const void* address, size_t bytes, uint32_t kind, const void* site, unsigned alignment) {
  if (active_checker) active_checker->access(address, bytes, kind, site, alignment);
}

}  // namespace lily_sim

using lily_sim::active_checker;
using lily_sim::kRead;
using lily_sim::kWrite;

#define LILY_ACCESS(name, bytes, kind, alignment)                                                       \
  void name(void* p) {                                                                                  \
    if (active_checker) active_checker->access(p, bytes, kind, __builtin_return_address(0), alignment); \
  }
#define LILY_BOTH(name, bytes, alignment)                                             \
  void name(void* p) {                                                                \
    if (!active_checker) return;                                                      \
    active_checker->access(p, bytes, kRead, __builtin_return_address(0), alignment);  \
    active_checker->access(p, bytes, kWrite, __builtin_return_address(0), alignment); \
  }
#define LILY_SIZES(n)                                  \
  LILY_ACCESS(__tsan_read##n, n, kRead, n)             \
  LILY_ACCESS(__tsan_write##n, n, kWrite, n)           \
  LILY_ACCESS(__tsan_unaligned_read##n, n, kRead, 1)   \
  LILY_ACCESS(__tsan_unaligned_write##n, n, kWrite, 1) \
  LILY_BOTH(__tsan_read_write##n, n, n)                \
  LILY_BOTH(__tsan_unaligned_read_write##n, n, 1)

extern "C" {
LILY_SIZES(1)
LILY_SIZES(2)
LILY_SIZES(4)
LILY_SIZES(8)
LILY_SIZES(16)

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void __tsan_ignore_thread_begin() {}
void __tsan_ignore_thread_end() {}

void* __tsan_memcpy(void* to, const void* from, unsigned long bytes) {
  if (active_checker && bytes) {
    active_checker->access(from, bytes, kRead, __builtin_return_address(0), 1);
    active_checker->access(to, bytes, kWrite, __builtin_return_address(0), 1);
  }
  return std::memcpy(to, from, bytes);
}
void* __tsan_memmove(void* to, const void* from, unsigned long bytes) {
  if (active_checker && bytes) {
    active_checker->access(from, bytes, kRead, __builtin_return_address(0), 1);
    active_checker->access(to, bytes, kWrite, __builtin_return_address(0), 1);
  }
  return std::memmove(to, from, bytes);
}
void* __tsan_memset(void* to, int value, unsigned long bytes) {
  if (active_checker && bytes) active_checker->access(to, bytes, kWrite, __builtin_return_address(0), 1);
  return std::memset(to, value, bytes);
}
}
