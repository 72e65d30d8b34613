// Subnormals as zero, in operands and results. Tile units know no other mode, so the matrix products of every x86 variant run in it.
#pragma once
#include "device/cpu/simd.hpp"

namespace lily::cpu::LILY_CPU_NS {

#if defined(__AVX2__)
class FlushSubnormals {
 public:
  FlushSubnormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
  ~FlushSubnormals() { _mm_setcsr(before_); }
  FlushSubnormals(const FlushSubnormals&) = delete;

 private:
  unsigned before_;
};
#else
struct FlushSubnormals {
  FlushSubnormals() {}
};
#endif

}  // namespace lily::cpu::LILY_CPU_NS
