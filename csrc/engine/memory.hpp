// One byte budget for everything a model holds. Reservations come before allocations.
#pragma once
#include <array>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>

#include "base/error.hpp"

namespace lily {

enum class MemoryKind { weights, kv, states, workspace, requests };
constexpr int kMemoryKinds = 5;

// What memory is asked for: work that fails without it, or a snapshot, for which no session that is in use gives up one.
enum class Need { work, snapshot };

class MemoryBudget {
 public:
  explicit MemoryBudget(uint64_t limit) : limit_(limit) {}

  // `make_room` lets go of something that is kept for reuse only; false when there is nothing. Called without the budget's lock.
  void set_make_room(std::function<bool(Need)> make_room) { make_room_ = std::move(make_room); }
  void reserve(MemoryKind kind, uint64_t bytes, Need need = Need::work) {
    if (kind != MemoryKind::weights && bytes + used(MemoryKind::weights) > limit_) refuse(kind, bytes);  // nothing that could be given up would be enough
    while (!try_reserve(kind, bytes))
      if (!make_room(need)) {
        if (try_reserve(kind, bytes)) return;  // what another thread held for a moment, or made room of
        refuse(kind, bytes);
      }
  }
  // As it stands, without making room.
  bool try_reserve(MemoryKind kind, uint64_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (bytes > limit_ || total() > limit_ - bytes) return false;
    used_[int(kind)] += bytes;
    return true;
  }
  bool make_room(Need need = Need::work) { return make_room_ && make_room_(need); }
  [[noreturn]] void refuse(MemoryKind kind, uint64_t bytes) const {
    std::lock_guard<std::mutex> lock(mutex_);
    static const char* kNames[] = {"the weights", "the K/V cache", "the recurrent states", "the workspace", "the request"};
    throw OutOfMemoryError(std::string(kNames[int(kind)]) + " do not fit in the memory limit of " + std::to_string(limit_) + " bytes", bytes,
                           limit_ > total() ? limit_ - total() : 0, "raise memory_limit, lower max_context, or close sessions that are no longer needed");
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
  std::function<bool(Need)> make_room_;
  mutable std::mutex mutex_;
  std::array<uint64_t, kMemoryKinds> used_{};
};

}  // namespace lily
