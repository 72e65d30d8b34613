// What every kernel shares: the storage of activations, conversions that give the same bits on every device, and the few functions
// of one value that fused kernels and their twins have in common. The library is compiled once per activation storage.
#ifndef LILY_H
#define LILY_H
#include <metal_stdlib>
using namespace metal;
#ifndef LILY_UNIT_BEGIN  // Apple's compiler: the others are told on their command line
// A multiply-add is fused only where fma() says so: twins would not agree in every bit otherwise.
#pragma METAL fp contract(off)
#endif
#include "args.h"

// Arrays of a thread stay in registers only when the loops over them are unrolled.
#define LILY_UNROLL _Pragma("clang loop unroll(full)")

inline float bf16_value(uint bits) { return as_type<float>(bits << 16); }

// Nearest even, in integers: M1 and M2 have no bfloat of their own, and every device gives these bits.
inline uint bf16_bits(float x) {
  uint b = as_type<uint>(x);
  return (b & 0x7fffffffu) > 0x7f800000u ? (b >> 16 | 0x40u) : (b + 0x7fffu + (b >> 16 & 1u)) >> 16;
}

// act: how an activation is stored. act_pack: four neighbours, read and written at once.
#ifdef LILY_STORAGE_FLOAT32
typedef float act;
typedef float4 act_pack;
inline act round_act(float x) { return x; }
inline float act_value(act x) { return x; }
inline float rounded(float x) { return x; }
inline float4 unpack_act(act_pack p) { return p; }
inline act_pack pack_act(float4 v) { return v; }
#else
typedef bfloat act;
typedef uint2 act_pack;
inline float rounded(float x) { return bf16_value(bf16_bits(x)); }
inline act round_act(float x) { return bfloat(rounded(x)); }
inline float act_value(act x) { return float(x); }
inline float4 unpack_act(act_pack p) {
  return float4(as_type<float>(p.x << 16), as_type<float>(p.x & 0xffff0000u), as_type<float>(p.y << 16), as_type<float>(p.y & 0xffff0000u));
}
inline act_pack pack_act(float4 v) { return uint2(bf16_bits(v.x) | bf16_bits(v.y) << 16, bf16_bits(v.z) | bf16_bits(v.w) << 16); }
#endif

inline float sigmoid(float x) { return 1.0f / (1.0f + metal::exp(-x)); }
inline float silu(float x) { return x / (1.0f + metal::exp(-x)); }
inline float swiglu(float gate, float up) { return silu(gate) * up; }

// Larger float, larger key; -0 and +0 differ, so callers add 0.0f first.
inline uint order_key(float v) {
  uint b = as_type<uint>(v);
  return (b >> 31) != 0u ? ~b : b | 0x80000000u;
}
inline float order_value(uint key) { return as_type<float>((key >> 31) != 0u ? key ^ 0x80000000u : ~key); }

inline bool is_bound(uint present, uint index) { return (present >> index & 1u) != 0u; }

inline float minus_infinity() { return as_type<float>(0xff800000u); }

#endif
