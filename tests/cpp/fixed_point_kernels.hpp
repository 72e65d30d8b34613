// What fixed_point.hpp computes, compiled for AVX-512 or NEON in a file of its own.
#pragma once
#include <cstdint>

namespace lily::test {

bool fixed_point_runs();   // on this processor
bool has_byte_products();  // the instruction for it
// The unit of 64 values, and each as a number of units.
float fixed_values(const float* x, int32_t* X);
// Two steps: sums[32] of 256 codes of 4 bits times 256 values, lanes as the kernel has them; units[32].
void fixed_sums(bool instruction, const uint8_t* codes, const float* x, float* sums, float* units);

}  // namespace lily::test
