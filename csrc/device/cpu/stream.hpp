// Results that are too many for the caches go past them: written as usual, each line would be read from memory first.
#pragma once
#include "device/cpu/simd.hpp"

namespace lily::cpu::LILY_CPU_NS {

class Stream {
 public:
  // Rows of `floats` each, the first one at p.
  Stream(const float* p, uint64_t floats, uint64_t rows) : past_(floats * rows * 4 >= kBytes && floats % 16 == 0 && reinterpret_cast<uintptr_t>(p) % 64 == 0) {}
  ~Stream() {
#if defined(__AVX2__)
    _mm_sfence();  // before anyone is told that they are there
#endif
  }
  Stream(const Stream&) = delete;

  // `to` is a multiple of 16 floats away from p.
  void write(float* to, V v) const {
#if defined(__AVX512F__)
    if (past_) return _mm512_stream_ps(to, v.v);
#elif defined(__AVX2__)
    if (past_) {
      _mm256_stream_ps(to, v.lo);
      return _mm256_stream_ps(to + 8, v.hi);
    }
#endif
    store(to, v);
  }

 private:
  static constexpr uint64_t kBytes = 16 << 20;
  [[maybe_unused]] const bool past_;
};

}  // namespace lily::cpu::LILY_CPU_NS
