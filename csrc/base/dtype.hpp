// Element types and the exact conversions between them.
#pragma once
#include <cstdint>
#include <cstring>
#include <string>

namespace lily {

enum class DType : uint8_t { u8, i32, u32, f32, f16, bf16 };

inline uint64_t dtype_bytes(DType t) {
  switch (t) {
    case DType::u8: return 1;
    case DType::f16:
    case DType::bf16: return 2;
    default: return 4;
  }
}

inline float bf16_to_f32(uint16_t v) {
  uint32_t bits = uint32_t(v) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

// Round to nearest even; NaN stays NaN.
inline uint16_t f32_to_bf16(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t((bits >> 16) | 0x40);
  return uint16_t((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

inline float f16_to_f32(uint16_t v) {
  uint32_t sign = uint32_t(v & 0x8000) << 16, exponent = (v >> 10) & 31, mantissa = v & 1023;
  uint32_t bits;
  if (exponent == 31) {
    bits = sign | 0x7f800000u | (mantissa << 13);
  } else if (exponent) {
    bits = sign | ((exponent + 112) << 23) | (mantissa << 13);
  } else {  // zero and subnormals: mantissa * 2^-24
    float f = float(mantissa) * 5.9604644775390625e-8f;
    std::memcpy(&bits, &f, 4);
    bits |= sign;
  }
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

}  // namespace lily
