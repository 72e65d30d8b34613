// Function constants: storage that launches fill, and that kernels see as constants (shim/kernel.hpp).
#include <cstdint>

#define LILY_FC_EACH(do)                                                                                                                                                        \
  do                                                                                                                                                                            \
  (0) do(1) do(2) do(3) do(4) do(5) do(6) do(7) do(8) do(9) do(10) do(11) do(12) do(13) do(14) do(15) do(16) do(17) do(18) do(19) do(20) do(21) do(22) do(23) do(24) do(25) do( \
      26) do(27) do(28) do(29) do(30) do(31)

extern "C" {
#define LILY_DEFINE(i) uint32_t lily_fc_##i;
LILY_FC_EACH(LILY_DEFINE)
}

namespace lily_sim {

void set_constants(const uint32_t* values, uint32_t n) {
#define LILY_ADDRESS(i) &lily_fc_##i,
  static uint32_t* const all[] = {LILY_FC_EACH(LILY_ADDRESS)};
  for (uint32_t i = 0; i < 32; i++) *all[i] = i < n ? values[i] : 0;
}

}  // namespace lily_sim
