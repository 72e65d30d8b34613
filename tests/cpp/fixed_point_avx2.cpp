#if defined(LILY_X86)
#define LILY_CPU_NS tested_avx2
#include "fixed_point_kernels.inc"

namespace lily::test {
static bool runs() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
const FixedPointForm fixed_point_avx2{"AVX2", runs, fixed_point_has_byte_products, fixed_values, fixed_sums};
}  // namespace lily::test
#endif
