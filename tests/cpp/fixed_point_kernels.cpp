#include "fixed_point_kernels.hpp"

#if defined(LILY_X86) || defined(LILY_ARM)
#define LILY_CPU_NS tested
#include "device/cpu/fixed_point.hpp"

namespace lily::test {

using namespace lily::cpu::tested;

#if defined(LILY_X86)
bool fixed_point_runs() { return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"); }
#else
bool fixed_point_runs() { return true; }
#endif
bool has_byte_products() { return byte_products(); }

float fixed_values(const float* x, int32_t* X) {
  uint8_t d2[64], d1[64], d0[64];
  const float unit = digits_of_group(x, d2, d1, d0);
  for (int i = 0; i < 64; i++) X[i] = (int8_t(d2[i]) * 256 + int8_t(d1[i])) * 256 + int8_t(d0[i]);
  return unit;
}

void fixed_sums(bool instruction, const uint8_t* codes, const float* x, float* sums, float* units) {
  alignas(64) float scratch[fixed_point_floats(256)];
  const FixedPoint f = fixed_point(x, 256, scratch);
  const U c[2] = {loadu(codes), loadu(codes + 64)};
  V found[2];
  if (instruction)
    fixed_dots<true, 2, 1>(c, f.digits, found);
  else
    fixed_dots<false, 2, 1>(c, f.digits, found);
  for (int s = 0; s < 2; s++) store(sums + 16 * s, found[s]);
  std::memcpy(units, f.units, 128);
}

}  // namespace lily::test
#else
namespace lily::test {
bool fixed_point_runs() { return false; }
bool has_byte_products() { return false; }
float fixed_values(const float*, int32_t*) { return 0; }
void fixed_sums(bool, const uint8_t*, const float*, float*, float*) {}
}  // namespace lily::test
#endif
