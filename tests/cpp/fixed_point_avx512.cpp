#if defined(LILY_X86)
#define LILY_CPU_NS tested_avx512
#include "fixed_point_kernels.inc"

namespace lily::test {
static bool runs() { return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"); }
const FixedPointForm fixed_point_avx512{"AVX-512", runs, fixed_point_has_byte_products, fixed_values, fixed_sums};
}  // namespace lily::test
#endif
