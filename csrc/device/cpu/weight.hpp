// A weight matrix where it lies in the checkpoint: rows of packed codes with a bf16 scale and bias per group, or plain values.
// Any address; nothing is read past the last byte of a row, because the last row may end at the end of a mapped page.
#pragma once
#include "args.h"
#include "device/cpu/simd.hpp"

namespace lily::cpu::LILY_CPU_NS {

// A fresh stack array of n floats at a 64-byte boundary: a kernel's scratch has the size its call asks for.
#define LILY_STACK_FLOATS(n) reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(__builtin_alloca((n) * sizeof(float) + 64)) + 63) & ~uintptr_t(63))

struct Weight {
  LilyFormat fmt;
  uint32_t K;
  uint32_t groups;  // of a row
  uint64_t row_bytes;
  const uint8_t *codes, *scales, *biases;

  const uint8_t* row(uint64_t r) const { return codes + r * row_bytes; }
  const uint8_t* row_scales(uint64_t r) const { return scales + r * groups * 2; }
  const uint8_t* row_biases(uint64_t r) const { return biases + r * groups * 2; }
  bool fast(uint32_t bits) const { return fmt.kind == LILY_W_AFFINE && fmt.bits == bits && fmt.group == 64; }
};

// buffers: codes, scales, biases.
LILY_INLINE Weight make_weight(const LilyFormat& fmt, uint32_t K, void* const* buffers) {
  Weight w{fmt, K, 0, 0, static_cast<const uint8_t*>(buffers[0]), static_cast<const uint8_t*>(buffers[1]), static_cast<const uint8_t*>(buffers[2])};
  if (fmt.kind == LILY_W_AFFINE) {
    w.groups = K / fmt.group;
    w.row_bytes = uint64_t(K) * fmt.bits / 8;
  } else {
    w.row_bytes = uint64_t(K) * (fmt.kind == LILY_W_F32 ? 4 : 2);
  }
  return w;
}

LILY_INLINE uint32_t round_up(uint32_t n, uint32_t m) { return (n + m - 1) / m * m; }
LILY_INLINE uint32_t smaller(uint32_t a, uint32_t b) { return a < b ? a : b; }
LILY_INLINE float bf16_at(const void* p) { return bf16_float(load_any<uint16_t>(p)); }
LILY_INLINE V load_bf16(const void* p) { return from_bits(shl<16>(load_u16(p))); }
LILY_INLINE V load_f16(const void* p) {  // finite values; the product restores the exponent bias, also of subnormals
  U h = load_u16(p);
  U sign = shl<16>(andu(h, splatu(0x8000)));
  V magnitude = mul(from_bits(shl<13>(andu(h, splatu(0x7fff)))), splat(0x1p112f));
  return from_bits(oru(bits(magnitude), sign));
}

// Up to 16 values; the rest of the lanes is zero and not read.
LILY_INLINE V load_n(const float* p, uint32_t n) {
  if (n >= 16) return load(p);
  float t[16] = {};
  for (uint32_t i = 0; i < n; i++) t[i] = p[i];
  return load(t);
}
template <class T> LILY_INLINE void store_n(T* p, V v, uint32_t n) {
  if (n >= 16) return store(p, v);
  T t[16];
  store(t, v);
  for (uint32_t i = 0; i < n; i++) p[i] = t[i];
}

// 0, 1, .. 15: codes of 4 bits become floats by a look-up.
LILY_INLINE V digits() {
  static const float d[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return load(d);
}

// Unpacks 16 codes of any width from the bit stream of a row.
struct CodeReader {
  uint32_t width;
  U offset, shift, mask;

  explicit CodeReader(uint32_t width) : width(width), mask(splatu((1u << width) - 1)) {
    uint32_t o[16], s[16];
    for (uint32_t i = 0; i < 16; i++) o[i] = i * width / 8, s[i] = i * width % 8;
    offset = loadu(o);
    shift = loadu(s);
  }
  // Codes j..j+15 of a row of row_bytes bytes, j a multiple of 16.
  V read(const uint8_t* row, uint64_t row_bytes, uint32_t j) const {
    uint64_t at = uint64_t(j) * width / 8;
    uint8_t copy[32] = {};
    const uint8_t* p = row + at;
    if (row_bytes - at < 20) {  // the gather reads 32 bits at each offset
      std::memcpy(copy, p, 2 * width);
      p = copy;
    }
    return to_float(andu(shrv(gather_u32(p, offset), shift), mask));
  }
};

}  // namespace lily::cpu::LILY_CPU_NS
