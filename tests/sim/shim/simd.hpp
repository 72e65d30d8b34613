// Barriers and what the 32 lanes of a simdgroup do together. Every lane of the simdgroup must take part.
#pragma once
#include <new>

#include "../runtime.hpp"
#include "math.hpp"

#pragma clang attribute push(__attribute__((disable_sanitizer_instrumentation)), apply_to = function)

#define LILY_COLLECTIVE __attribute__((noinline, convergent))

namespace metal {

enum class mem_flags : uint { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
inline constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(uint(a) | uint(b)); }

LILY_COLLECTIVE inline void threadgroup_barrier(mem_flags flags) { ::lily_sim::threadgroup_barrier(uint(flags), __builtin_return_address(0)); }
LILY_COLLECTIVE inline void simdgroup_barrier(mem_flags flags) { ::lily_sim::simdgroup_barrier(uint(flags), __builtin_return_address(0)); }

}  // namespace metal

namespace lily_sim {

template <class T>
inline T& in(Simd& s, unsigned i) {
  static_assert(sizeof(T) <= 64, "operand of a collective");
  return *reinterpret_cast<T*>(s.in[i]);
}
template <class T>
inline T& out(Simd& s, unsigned i) {
  return *reinterpret_cast<T*>(s.out[i]);
}

// Every lane brings `value`; the last to come computes all 32 results with combine(simdgroup).
template <class T, class R, class Combine>
inline __attribute__((always_inline)) R meet(const char* what, const void* site, T value, uint32_t operand, Combine combine) {
  Lane& l = lane();
  Simd& s = *l.simd;
  const unsigned i = l.index;
  ::new (static_cast<void*>(s.in[i])) T(value);
  if (arrive(what, site, operand)) combine(s);
  return out<R>(s, i);
}

// A butterfly, the order that Apple's and NVIDIA's hardware suggest: x + x^16, then ^8 and so on.
template <class T, class Op>
inline __attribute__((always_inline)) T reduce(const char* what, const void* site, T value, Op op) {
  return meet<T, T>(what, site, value, 0, [op](Simd& s) __attribute__((always_inline)) {
    T v[kSimdWidth];
    for (unsigned i = 0; i < kSimdWidth; i++) v[i] = in<T>(s, i);
    for (unsigned step = kSimdWidth / 2; step; step /= 2)
      for (unsigned i = 0; i < step; i++) v[i] = op(v[i], v[i + step]);
    for (unsigned i = 0; i < kSimdWidth; i++) out<T>(s, i) = v[0];
  });
}

// Lane i takes the value of lane from(i, n), with the n that it brought itself.
template <class T, class From>
inline __attribute__((always_inline)) T permute(const char* what, const void* site, T value, uint32_t n, From) {
  struct Carried {
    T value;
    uint32_t n;
  };
  return meet<Carried, T>(what, site, Carried{value, n}, 0, [](Simd& s) __attribute__((always_inline)) {
    for (unsigned i = 0; i < kSimdWidth; i++) {
      const unsigned source = From{}(i, in<Carried>(s, i).n);
      // Outside of the simdgroup there is nothing to read: the lane keeps its own value.
      out<T>(s, i) = in<Carried>(s, source < kSimdWidth ? source : i).value;
    }
  });
}

}  // namespace lily_sim

namespace metal {

#define LILY_REDUCTION(name, expression)                                                                                                            \
  template <class T>                                                                                                                                \
  LILY_COLLECTIVE T name(T value) {                                                                                                                 \
    return ::lily_sim::reduce<T>(#name, __builtin_return_address(0), value, [](T a, T b) __attribute__((always_inline)) { return T(expression); }); \
  }
LILY_REDUCTION(simd_sum, a + b)
LILY_REDUCTION(simd_product, a* b)
LILY_REDUCTION(simd_min, metal::min(a, b))
LILY_REDUCTION(simd_max, metal::max(a, b))
LILY_REDUCTION(simd_and, a& b)
LILY_REDUCTION(simd_or, a | b)
LILY_REDUCTION(simd_xor, a ^ b)
#undef LILY_REDUCTION

#define LILY_SHUFFLE(name, ...)                                                                                                      \
  template <class T>                                                                                                                 \
  LILY_COLLECTIVE T name(T value, ushort n) {                                                                                        \
    return ::lily_sim::permute<T>(#name, __builtin_return_address(0), value, n, [](unsigned i, unsigned n) { return __VA_ARGS__; }); \
  }
LILY_SHUFFLE(simd_shuffle, (void(i), n))
LILY_SHUFFLE(simd_broadcast, (void(i), n))
LILY_SHUFFLE(simd_shuffle_xor, i ^ n)
LILY_SHUFFLE(simd_shuffle_up, i - n)
LILY_SHUFFLE(simd_shuffle_down, i + n)
LILY_SHUFFLE(simd_shuffle_rotate_up, (i - n) % 32)
LILY_SHUFFLE(simd_shuffle_rotate_down, (i + n) % 32)
LILY_SHUFFLE(quad_shuffle, (i & ~3u) | (n & 3))
LILY_SHUFFLE(quad_broadcast, (i & ~3u) | (n & 3))
LILY_SHUFFLE(quad_shuffle_xor, i ^ (n & 3))
#undef LILY_SHUFFLE

template <class T>
LILY_COLLECTIVE T simd_broadcast_first(T value) {
  return ::lily_sim::permute<T>("simd_broadcast_first", __builtin_return_address(0), value, 0, [](unsigned, unsigned) { return 0u; });
}

template <class T>
LILY_COLLECTIVE T simd_prefix_inclusive_sum(T value) {
  return ::lily_sim::meet<T, T>("simd_prefix_inclusive_sum", __builtin_return_address(0), value, 0, [](::lily_sim::Simd& s) {
    T sum = T(0);
    for (unsigned i = 0; i < 32; i++) ::lily_sim::out<T>(s, i) = sum = sum + ::lily_sim::in<T>(s, i);
  });
}
template <class T>
LILY_COLLECTIVE T simd_prefix_exclusive_sum(T value) {
  return ::lily_sim::meet<T, T>("simd_prefix_exclusive_sum", __builtin_return_address(0), value, 0, [](::lily_sim::Simd& s) {
    T sum = T(0);
    for (unsigned i = 0; i < 32; i++) {
      ::lily_sim::out<T>(s, i) = sum;
      sum = sum + ::lily_sim::in<T>(s, i);
    }
  });
}

// The 32 votes as bits.
struct simd_vote {
  typedef ulong vote_t;
  vote_t bits;
  explicit operator vote_t() const { return bits; }
  bool all() const { return bits == 0xFFFFFFFFu; }
  bool any() const { return bits != 0; }
};
LILY_COLLECTIVE inline simd_vote simd_ballot(bool vote) {
  const uint bits = ::lily_sim::meet<uint, uint>("simd_ballot", __builtin_return_address(0), vote, 0, [](::lily_sim::Simd& s) {
    uint all = 0;
    for (unsigned i = 0; i < 32; i++) all |= ::lily_sim::in<uint>(s, i) << i;
    for (unsigned i = 0; i < 32; i++) ::lily_sim::out<uint>(s, i) = all;
  });
  return simd_vote{bits};
}
LILY_COLLECTIVE inline bool simd_any(bool vote) {
  return ::lily_sim::reduce<uint>("simd_any", __builtin_return_address(0), vote, [](uint a, uint b) { return a | b; }) != 0;
}
LILY_COLLECTIVE inline bool simd_all(bool vote) {
  return ::lily_sim::reduce<uint>("simd_all", __builtin_return_address(0), vote, [](uint a, uint b) { return a & b; }) != 0;
}
inline bool simd_is_first() { return ::lily_sim::lane().index == 0; }

}  // namespace metal

#pragma clang attribute pop
