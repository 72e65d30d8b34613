// The eight tile registers of AMX: 16 rows of 64 bytes each. C[n][t] += A[n][k] B[k][t] in bf16 with fp32 sums, 32 of k at a time:
// the products of even and of odd k are two chains of fused multiply-adds from zero, then C += even + odd; subnormals count as zero.
// That is the order of gemm_tile.hpp. With LILY_AMX_EMULATED the registers are memory and the same arithmetic runs on vectors,
// so that everything around the tiles can be tested on any machine with AVX-512.
#pragma once
#include "device/cpu/flush.hpp"
#include "device/cpu/simd.hpp"

namespace lily::cpu::LILY_CPU_NS {

constexpr uint32_t kTileRows = 16, kTileBytes = 1024, kTileWords = 256;

#if defined(LILY_AMX_EMULATED)

struct TileRegisters {
  uint32_t word[8][16][16];
};
inline thread_local TileRegisters tile_registers;

template <int T> LILY_INLINE void tile_zero() { std::memset(tile_registers.word[T], 0, kTileBytes); }
template <int T> LILY_INLINE void tile_load(const void* p) { std::memcpy(tile_registers.word[T], p, kTileBytes); }
template <int T> LILY_INLINE void tile_store(void* p) { std::memcpy(p, tile_registers.word[T], kTileBytes); }
// The same with rows that are `stride` bytes apart.
template <int T> LILY_INLINE void tile_load(const void* p, uint64_t stride) {
  for (int i = 0; i < 16; i++) std::memcpy(tile_registers.word[T][i], static_cast<const char*>(p) + i * stride, 64);
}
template <int T> LILY_INLINE void tile_store(void* p, uint64_t stride) {
  for (int i = 0; i < 16; i++) std::memcpy(static_cast<char*>(p) + i * stride, tile_registers.word[T][i], 64);
}
template <int C, int A, int B> static __attribute__((noinline)) void tile_multiply() {
  auto& r = tile_registers;
  FlushSubnormals flush;
  for (int n = 0; n < 16; n++) {
    V even = zero(), odd = zero();
    for (int k = 0; k < 16; k++) {
      const U b = loadu(r.word[B][k]);
      even = fma(splat(bits_float(r.word[A][n][k] << 16)), from_bits(shl<16>(b)), even);
      odd = fma(splat(bits_float(r.word[A][n][k] & 0xffff0000u)), from_bits(andu(b, splatu(0xffff0000u))), odd);
    }
    V c = add(from_bits(loadu(r.word[C][n])), add(even, odd));
    store(reinterpret_cast<float*>(r.word[C][n]), c);
  }
}

struct TileSession {
  TileSession() {}
};

#else

template <int T> LILY_INLINE void tile_zero() { __asm__ volatile("tilezero %%tmm%c0" ::"i"(T)); }
template <int T> LILY_INLINE void tile_load(const void* p) { __asm__ volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(T), "r"(p), "r"(64l) : "memory"); }
template <int T> LILY_INLINE void tile_store(void* p) { __asm__ volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(T), "r"(p), "r"(64l) : "memory"); }
template <int T> LILY_INLINE void tile_load(const void* p, uint64_t stride) { __asm__ volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(T), "r"(p), "r"(stride) : "memory"); }
template <int T> LILY_INLINE void tile_store(void* p, uint64_t stride) { __asm__ volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(T), "r"(p), "r"(stride) : "memory"); }
template <int C, int A, int B> LILY_INLINE void tile_multiply() { __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B)); }

// Tiles are configured for as long as this lives. The whole operand is named: with less of it the compiler drops its stores.
struct TileSession {
  struct alignas(64) Config {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  };
  static_assert(sizeof(Config) == 64);
  TileSession() {
    const Config config;
    __asm__ volatile("ldtilecfg %0" ::"m"(config));
  }
  ~TileSession() { __asm__ volatile("tilerelease"); }
  TileSession(const TileSession&) = delete;
};

#endif

}  // namespace lily::cpu::LILY_CPU_NS
