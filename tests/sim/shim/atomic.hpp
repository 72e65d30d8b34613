// Atomics: relaxed, 32 bits, in device and threadgroup memory.
#pragma once
#include "../runtime.hpp"
#include "types.hpp"

#pragma clang attribute push(__attribute__((disable_sanitizer_instrumentation)), apply_to = function)

namespace metal {

enum memory_order { memory_order_relaxed = 0 };

template <class T>
struct _atomic {
  T value;
};
template <class T>
using atomic = _atomic<T>;
typedef _atomic<uint> atomic_uint;
typedef _atomic<int> atomic_int;
typedef _atomic<float> atomic_float;
typedef _atomic<bool> atomic_bool;

#define LILY_ATOMIC __attribute__((noinline))

template <class T>
LILY_ATOMIC T atomic_load_explicit(const volatile _atomic<T>* p, memory_order) {
  ::lily_sim::touch(const_cast<_atomic<T>*>(p), sizeof(T), ::lily_sim::kAtomicRead, __builtin_return_address(0), sizeof(T));
  T v;
  __atomic_load(const_cast<T*>(&p->value), &v, __ATOMIC_RELAXED);
  return v;
}
template <class T, class U>
LILY_ATOMIC void atomic_store_explicit(volatile _atomic<T>* p, U value, memory_order) {
  ::lily_sim::touch(const_cast<_atomic<T>*>(p), sizeof(T), ::lily_sim::kAtomicWrite, __builtin_return_address(0), sizeof(T));
  T v = T(value);
  __atomic_store(const_cast<T*>(&p->value), &v, __ATOMIC_RELAXED);
}

}  // namespace metal

namespace lily_sim {

template <class T, class Op>
inline __attribute__((always_inline)) T update(const volatile metal::_atomic<T>* p, const void* site, Op op) {
  T* at = const_cast<T*>(&p->value);
  touch(at, sizeof(T), kAtomicUpdate, site, sizeof(T));
  T before, after;
  __atomic_load(at, &before, __ATOMIC_RELAXED);
  do {
    after = op(before);
  } while (!__atomic_compare_exchange(at, &before, &after, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return before;
}

}  // namespace lily_sim

namespace metal {

#define LILY_FETCH(name, expression)                                                                                                                                    \
  template <class T, class U>                                                                                                                                           \
  LILY_ATOMIC T name(volatile _atomic<T>* p, U operand, memory_order) {                                                                                                 \
    const T b = T(operand);                                                                                                                                             \
    return ::lily_sim::update<T>(p, __builtin_return_address(0), [b](T a) __attribute__((always_inline, disable_sanitizer_instrumentation)) { return T(expression); }); \
  }
LILY_FETCH(atomic_fetch_add_explicit, a + b)
LILY_FETCH(atomic_fetch_sub_explicit, a - b)
LILY_FETCH(atomic_fetch_min_explicit, b < a ? b : a)
LILY_FETCH(atomic_fetch_max_explicit, a < b ? b : a)
LILY_FETCH(atomic_fetch_and_explicit, a& b)
LILY_FETCH(atomic_fetch_or_explicit, a | b)
LILY_FETCH(atomic_fetch_xor_explicit, a ^ b)
LILY_FETCH(atomic_exchange_explicit, (void(a), b))
#undef LILY_FETCH

template <class T, class U>
LILY_ATOMIC bool atomic_compare_exchange_weak_explicit(volatile _atomic<T>* p, T* expected, U desired, memory_order, memory_order) {
  T* at = const_cast<T*>(&p->value);
  ::lily_sim::touch(at, sizeof(T), ::lily_sim::kAtomicUpdate, __builtin_return_address(0), sizeof(T));
  T want = T(desired);
  return __atomic_compare_exchange(at, expected, &want, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}

}  // namespace metal

#pragma clang attribute pop
