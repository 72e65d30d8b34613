// Where a checked launch keeps its memory: every buffer and every threadgroup array in 4 GiB of address space of its own, so that an
// address tells the array it belongs to, and no overrun reaches another array.
#pragma once
#include <cstddef>
#include <cstdint>

namespace lily_sim {

class Sandbox {
 public:
  static constexpr unsigned kSlots = 64;
  static constexpr uint64_t kSlotBytes = uint64_t(1) << 32;
  static constexpr uint64_t kStart = uint64_t(1) << 31;  // data begins in the middle: negative indices stay in the slot
  static constexpr unsigned kFirstThreadgroupSlot = 32;

  Sandbox();
  ~Sandbox();
  Sandbox(const Sandbox&) = delete;
  Sandbox& operator=(const Sandbox&) = delete;

  // `bytes` of memory in a slot, at an address that is `phase` modulo 256. Throws std::bad_alloc.
  char* reserve(unsigned slot, uint64_t bytes, unsigned phase);
  // kSlots when the address is outside.
  unsigned slot_of(const void* address) const {
    const uint64_t at = uint64_t(reinterpret_cast<uintptr_t>(address)) - base_;
    return at < kSlots * kSlotBytes ? unsigned(at >> 32) : kSlots;
  }

 private:
  void* mapping_;
  uint64_t base_ = 0;  // a multiple of the slot size
  uint64_t writable_[kSlots] = {};
};

}  // namespace lily_sim
