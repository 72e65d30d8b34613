// What fixed_point.hpp computes, in the forms that this program has: AVX-512 and AVX2, or NEON. Each is compiled in a file of its own.
#pragma once
#include <cstdint>
#include <vector>

namespace lily::test {

struct FixedPointForm {
  const char* name;
  bool (*runs)();               // on this processor
  bool (*has_byte_products)();  // the instruction for it
  // The unit of 64 values, and each as a number of units.
  float (*values)(const float* x, int32_t* X);
  // Two steps: sums[32] of 256 codes of 4 bits times 256 values, lanes as the kernel has them; units[32].
  void (*sums)(bool instruction, const uint8_t* codes, const float* x, float* sums, float* units);
};
std::vector<FixedPointForm> fixed_point_forms();

#if defined(LILY_X86)
extern const FixedPointForm fixed_point_avx512, fixed_point_avx2;
#elif defined(LILY_ARM)
extern const FixedPointForm fixed_point_neon;
#endif

}  // namespace lily::test
