// How the threads of a stage divide its threadgroups. Each has a contiguous share of about as much work, takes a part of what is left of it again and
// again, and then half of what another one has left, from the back. So memory is read in long streams, all threads end at about the same time, and one that
// is slower or held up by another process is helped.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

namespace lily {

class Shares {
 public:
  explicit Shares(uint32_t threads) : threads_(threads) {}

  // A dispatch: its threadgroups, how much work each of them is in the same measure for all dispatches of a stage, and how many are worth a piece.
  struct Part {
    uint32_t groups;
    uint64_t work;
    uint32_t least;
  };

  // A piece is 1/`fraction` of what is left of a share, or the least one. Not while anyone takes.
  void divide(const std::vector<Part>& parts, uint32_t fraction) {
    fraction_ = fraction;
    if (parts.size() > capacity_) {
      capacity_ = parts.size();
      ranges_.reset(new Range[capacity_ * threads_]);
    }
    least_.clear();
    uint64_t total = 0, before = 0;
    for (const Part& p : parts) total += p.groups * p.work;
    // thread t's share is [t, t + 1) * total / threads of all work; a threadgroup belongs to whose share its beginning lies in
    for (size_t i = 0; i < parts.size(); i++) {
      const Part& p = parts[i];
      uint32_t from = 0;
      for (uint32_t t = 0; t < threads_; t++) {
        const uint64_t bound = total * (t + 1) / threads_;
        uint32_t to = t + 1 == threads_ ? p.groups : bound <= before ? 0 : uint32_t(std::min<uint64_t>(p.groups, (bound - before + p.work - 1) / p.work));
        to = std::max(to, from);
        range(i, t).store(pack(from, to), std::memory_order_relaxed);
        from = to;
      }
      before += p.groups * p.work;
      least_.push_back(p.least);
    }
  }
  size_t parts() const { return least_.size(); }

  // The next piece of a thread's own share of a dispatch.
  bool own(size_t part, uint32_t thread, uint32_t* begin, uint32_t* end) {
    auto& r = range(part, thread);
    uint64_t v = r.load(std::memory_order_relaxed);
    for (;;) {
      const uint32_t b = first(v), e = last(v);
      if (b >= e) return false;
      const uint32_t n = std::min(e - b, std::max(least_[part], (e - b) / fraction_));
      if (!r.compare_exchange_weak(v, pack(b + n, e), std::memory_order_relaxed)) continue;
      *begin = b, *end = b + n;
      return true;
    }
  }
  // Makes half of what another thread has left this thread's own, which must be at its end.
  bool steal(size_t part, uint32_t thread) {
    for (uint32_t i = 1; i < threads_; i++) {
      auto& r = range(part, (thread + i) % threads_);
      uint64_t v = r.load(std::memory_order_relaxed);
      for (;;) {
        const uint32_t b = first(v), e = last(v);
        if (b >= e) break;
        const uint32_t n = std::min(e - b, std::max(least_[part], (e - b + 1) / 2));
        if (!r.compare_exchange_weak(v, pack(b, e - n), std::memory_order_relaxed)) continue;
        range(part, thread).store(pack(e - n, e), std::memory_order_relaxed);
        return true;
      }
    }
    return false;
  }

 private:
  struct alignas(64) Range {
    std::atomic<uint64_t> value{0};  // the first threadgroup in the lower half, the end in the upper: a threadgroup is in one range once, so no value returns
  };
  std::atomic<uint64_t>& range(size_t part, uint32_t thread) { return ranges_[part * threads_ + thread].value; }
  static uint64_t pack(uint32_t begin, uint32_t end) { return uint64_t(end) << 32 | begin; }
  static uint32_t first(uint64_t v) { return uint32_t(v); }
  static uint32_t last(uint64_t v) { return uint32_t(v >> 32); }

  const uint32_t threads_;
  uint32_t fraction_ = 2;
  size_t capacity_ = 0;
  std::unique_ptr<Range[]> ranges_;
  std::vector<uint32_t> least_;
};

}  // namespace lily
