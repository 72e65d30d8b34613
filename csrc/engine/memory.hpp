// One byte budget for everything a model holds. Reservations come before allocations.
#pragma once
#include <array>
#include <cstdint>
#include <mutex>
#include <string>

#include "base/error.hpp"

namespace lily {

enum class MemoryKind { weights, kv, states, workspace, requests };
constexpr int kMemoryKinds = 5;

class MemoryBudget {
 public:
  explicit MemoryBudget(uint64_t limit) : limit_(limit) {}

  void reserve(MemoryKind kind, uint64_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    uint64_t used = total();
    if (bytes > limit_ || used > limit_ - bytes) {
      static const char* kNames[] = {"the weights", "the K/V cache", "the recurrent states", "the workspace", "the request"};
      throw OutOfMemoryError(std::string(kNames[int(kind)]) + " do not fit in the memory limit of " + std::to_string(limit_) + " bytes", bytes, limit_ > used ? limit_ - used : 0,
                             "raise memory_limit, lower max_context, or close sessions that are no longer needed");
    }
    used_[int(kind)] += bytes;
  }
  void release(MemoryKind kind, uint64_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    used_[int(kind)] -= bytes;
  }
  uint64_t used(MemoryKind kind) const {
    std::lock_guard<std::mutex> lock(mutex_);
    return used_[int(kind)];
  }
  uint64_t used() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return total();
  }
  uint64_t limit() const { return limit_; }

 private:
  uint64_t total() const {
    uint64_t n = 0;
    for (uint64_t u : used_) n += u;
    return n;
  }
  const uint64_t limit_;
  mutable std::mutex mutex_;
  std::array<uint64_t, kMemoryKinds> used_{};
};

}  // namespace lily
