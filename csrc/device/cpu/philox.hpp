// Philox4x32-10 (Salmon et al., 2011): random words as a function of key and counter, so that a draw depends on seed and position alone.
#pragma once
#include "device/cpu/simd.hpp"

namespace lily::cpu::LILY_CPU_NS {

struct Philox { uint32_t word[4]; };

LILY_INLINE Philox philox(uint32_t key0, uint32_t key1, Philox x) {
  for (int round = 0; round < 10; round++) {
    uint64_t a = uint64_t(0xD2511F53u) * x.word[0], b = uint64_t(0xCD9E8D57u) * x.word[2];
    x = {{uint32_t(b >> 32) ^ x.word[1] ^ key0, uint32_t(b), uint32_t(a >> 32) ^ x.word[3] ^ key1, uint32_t(a)}};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return x;
}

}  // namespace lily::cpu::LILY_CPU_NS
