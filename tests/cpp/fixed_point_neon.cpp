#if defined(LILY_ARM)
#define LILY_NEON
#define LILY_CPU_NS tested_neon
#include "fixed_point_kernels.inc"

namespace lily::test {
static bool runs() { return true; }
const FixedPointForm fixed_point_neon{"NEON", runs, fixed_point_has_byte_products, fixed_values, fixed_sums};
}  // namespace lily::test
#endif
