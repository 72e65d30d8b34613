// Rounding to bfloat16 (nearest even), which clang calls and its runtime library may lack.
#include <cstdint>

extern "C" __attribute__((weak)) __bf16 __truncsfbf2(float value) {
  uint32_t bits = __builtin_bit_cast(uint32_t, value);
  const uint16_t rounded = (bits & 0x7FFFFFFFu) > 0x7F800000u ? uint16_t((bits >> 16) | 0x40) : uint16_t((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
  return __builtin_bit_cast(__bf16, rounded);
}
