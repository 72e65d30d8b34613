// One row of a weight as floats: any format of args.h, any address. For look-ups of single rows; products have their own unpacking.
#pragma once
#include "args.h"
#include "device/cpu/simd.hpp"

namespace lily::cpu::LILY_CPU_NS {

LILY_INLINE float f16_float(uint16_t h) {
  uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 0x3ff;
  if (exponent == 0) {
    float tiny = float(mantissa) * (1.0f / 16777216);  // subnormal: mantissa * 2^-24
    return bits_float(float_bits(tiny) | sign);
  }
  uint32_t e = exponent == 31 ? 255 : exponent + 112;
  return bits_float(sign | e << 23 | mantissa << 13);
}

// out[0..n) = values first.. of row `row` of a weight with rows of K values; first and n are multiples of 8. Affine: fma(scale, q, bias) with codes in a little-endian bit stream.
LILY_INLINE void dequant_part(const LilyFormat& fmt, const void* codes, const void* scales, const void* biases, uint32_t row, uint32_t K, uint32_t first, uint32_t n, float* out) {
  const uint8_t* data = static_cast<const uint8_t*>(codes);
  switch (fmt.kind) {
    case LILY_W_AFFINE: {
      data += uint64_t(row) * (K / 8 * fmt.bits) + first / 8 * fmt.bits;
      uint64_t groups = uint64_t(row) * (K / fmt.group);
      const uint8_t* scale_row = static_cast<const uint8_t*>(scales) + 2 * groups;
      const uint8_t* bias_row = static_cast<const uint8_t*>(biases) + 2 * groups;
      for (uint32_t j = 0; j < n; j += 8) {  // eight codes fill a whole number of bytes at every width
        uint64_t word = 0;
        for (uint32_t b = 0; b < fmt.bits; b++) word |= uint64_t(*data++) << (8 * b);
        float scale = bf16_float(load_any<uint16_t>(scale_row + 2 * ((first + j) / fmt.group)));
        float bias = bf16_float(load_any<uint16_t>(bias_row + 2 * ((first + j) / fmt.group)));
        for (uint32_t i = 0; i < 8; i++) {
          uint32_t q = uint32_t(word >> (fmt.bits * i)) & ((1u << fmt.bits) - 1);
          out[j + i] = fma1(scale, float(q), bias);
        }
      }
      break;
    }
    case LILY_W_BF16:
      data += (uint64_t(row) * K + first) * 2;
      for (uint32_t j = 0; j < n; j++) out[j] = bf16_float(load_any<uint16_t>(data + 2 * j));
      break;
    case LILY_W_F16:
      data += (uint64_t(row) * K + first) * 2;
      for (uint32_t j = 0; j < n; j++) out[j] = f16_float(load_any<uint16_t>(data + 2 * j));
      break;
    default:
      std::memcpy(out, data + (uint64_t(row) * K + first) * 4, uint64_t(n) * 4);
  }
}

LILY_INLINE void dequant_row(const LilyFormat& fmt, const void* codes, const void* scales, const void* biases, uint32_t row, uint32_t K, float* out) {
  dequant_part(fmt, codes, scales, biases, row, K, 0, K, out);
}

}  // namespace lily::cpu::LILY_CPU_NS
