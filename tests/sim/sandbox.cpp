#include "sandbox.hpp"

#include <sys/mman.h>

#include <new>

namespace lily_sim {

Sandbox::Sandbox() {
  void* p = mmap(nullptr, (kSlots + 1) * kSlotBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  mapping_ = p;
  base_ = (reinterpret_cast<uintptr_t>(p) + kSlotBytes - 1) / kSlotBytes * kSlotBytes;
}

Sandbox::~Sandbox() { munmap(mapping_, (kSlots + 1) * kSlotBytes); }

char* Sandbox::reserve(unsigned slot, uint64_t bytes, unsigned phase) {
  constexpr uint64_t kKeep = uint64_t(64) << 20;
  char* start = reinterpret_cast<char*>(base_ + slot * kSlotBytes + kStart);
  const uint64_t need = (bytes + phase + 65535) / 65536 * 65536;
  if (need > kSlotBytes - kStart) throw std::bad_alloc();
  if (need > writable_[slot]) {
    if (mprotect(start, need, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
    writable_[slot] = need;
  } else if (writable_[slot] > kKeep && need <= kKeep) {
    // Memory of a large buffer goes back once a small one follows.
    madvise(start + need, writable_[slot] - need, MADV_DONTNEED);
    mprotect(start + need, writable_[slot] - need, PROT_NONE);
    writable_[slot] = need;
  }
  return start + phase;
}

}  // namespace lily_sim
