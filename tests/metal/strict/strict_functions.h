// Metal's functions, declared for the types that Metal has them for.
#pragma once

namespace metal {

template <class T, int N>
using vec = T __attribute__((ext_vector_type(N)));

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);

// ---- arithmetic: T is float, half, bfloat or a vector of them; mixed arguments do not match, as in Metal --------------------
template <class T>
struct is_float {
  typedef typename lily::width<T>::element E;
  static constexpr bool value = lily::same<E, float>::value || lily::same<E, half>::value || lily::same<E, bfloat>::value;
};
template <class T>
struct is_integer {
  typedef typename lily::width<T>::element E;
  static constexpr bool value = !is_float<T>::value && !__is_class(E) && !__is_pointer(E) && !__is_enum(E);
};
template <class T>
using floating = typename lily::enable<is_float<T>::value, T>::type;
template <class T>
using integer = typename lily::enable<is_integer<T>::value, T>::type;
template <class T>
using number = typename lily::enable<is_float<T>::value || is_integer<T>::value, T>::type;
template <class T>
using element = typename lily::width<T>::element;

#define LILY_FLOAT_1(name) \
  template <class T>       \
  floating<T> name(T);
#define LILY_FLOAT_2(name) \
  template <class T>       \
  floating<T> name(T, T);
#define LILY_ALL_1(X)                                                                                                                       \
  X(exp) X(exp2) X(exp10) X(log) X(log2) X(log10) X(sqrt) X(rsqrt) X(sin) X(cos) X(tan) X(sinh) X(cosh) X(tanh) X(asin) X(acos) X(atan) \
  X(floor) X(ceil) X(trunc) X(rint) X(round) X(fract) X(fabs) X(saturate) X(sign)
LILY_ALL_1(LILY_FLOAT_1)
LILY_FLOAT_2(fmod) LILY_FLOAT_2(pow) LILY_FLOAT_2(powr) LILY_FLOAT_2(atan2) LILY_FLOAT_2(copysign) LILY_FLOAT_2(fmax) LILY_FLOAT_2(fmin) LILY_FLOAT_2(step)
template <class T>
floating<T> fma(T, T, T);
template <class T>
floating<T> mix(T, T, T);
template <class T>
floating<T> smoothstep(T, T, T);
template <class T>
T sincos(T, thread T&);
float ldexp(float, int);
template <class T>
element<T> dot(T, T);
template <class T>
element<T> length(T);
bool isnan(float);
bool isinf(float);
bool isfinite(float);
bool isnan(half);
bool isinf(half);
namespace precise {
LILY_ALL_1(LILY_FLOAT_1)
LILY_FLOAT_2(pow) LILY_FLOAT_2(powr) LILY_FLOAT_2(fmod)
template <class T>
floating<T> divide(T, T);
}  // namespace precise
namespace fast {
LILY_ALL_1(LILY_FLOAT_1)
LILY_FLOAT_2(pow) LILY_FLOAT_2(powr) LILY_FLOAT_2(fmod)
template <class T>
floating<T> divide(T, T);
}  // namespace fast
#undef LILY_FLOAT_1
#undef LILY_FLOAT_2
#undef LILY_ALL_1

template <class T>
number<T> max(T, T);
template <class T>
number<T> min(T, T);
template <class T>
number<T> max3(T, T, T);
template <class T>
number<T> min3(T, T, T);
template <class T>
number<T> clamp(T, T, T);
template <class T>
number<T> abs(T);
template <class T>
T select(T, T, bool);
template <class T>
integer<T> popcount(T);
template <class T>
integer<T> clz(T);
template <class T>
integer<T> ctz(T);
template <class T>
integer<T> mulhi(T, T);
template <class T>
integer<T> absdiff(T, T);
template <class T>
integer<T> rotate(T, T);
template <class T>
integer<T> reverse_bits(T);
template <class T>
integer<T> extract_bits(T, uint, uint);
template <class T>
integer<T> insert_bits(T, T, uint, uint);

template <class T>
struct numeric_limits;
template <>
struct numeric_limits<float> {
  static constexpr float max() { return FLT_MAX; }
  static constexpr float lowest() { return -FLT_MAX; }
  static constexpr float infinity() { return INFINITY; }
};

// ---- simdgroups: float, half and integers of at most 32 bits -------------------------------------------------------------
template <class T>
using shared = typename lily::enable<sizeof(element<T>) <= 4 && !lily::same<element<T>, bfloat>::value, T>::type;
#define LILY_SIMD(name, ...) \
  template <class T>         \
  shared<T> name(T __VA_ARGS__);
LILY_SIMD(simd_sum)
LILY_SIMD(simd_product)
LILY_SIMD(simd_max)
LILY_SIMD(simd_min)
LILY_SIMD(simd_and)
LILY_SIMD(simd_or)
LILY_SIMD(simd_xor)
LILY_SIMD(simd_prefix_inclusive_sum)
LILY_SIMD(simd_prefix_exclusive_sum)
LILY_SIMD(simd_broadcast, , ushort)
LILY_SIMD(simd_broadcast_first)
LILY_SIMD(simd_shuffle, , ushort)
LILY_SIMD(simd_shuffle_xor, , ushort)
LILY_SIMD(simd_shuffle_up, , ushort)
LILY_SIMD(simd_shuffle_down, , ushort)
LILY_SIMD(quad_sum)
LILY_SIMD(quad_max)
LILY_SIMD(quad_broadcast, , ushort)
LILY_SIMD(quad_shuffle, , ushort)
LILY_SIMD(quad_shuffle_xor, , ushort)
#undef LILY_SIMD
bool simd_all(bool);
bool simd_any(bool);
bool simd_is_first();
struct simd_vote {
  typedef ulong vote_t;
  explicit operator vote_t() const;
  bool all() const;
  bool any() const;
};
simd_vote simd_ballot(bool);

// ---- atomics: relaxed order only ---------------------------------------------------------------------------------------------
enum memory_order { memory_order_relaxed };
template <class T>
struct atomic {
  T lily_value;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<float> atomic_float;
#define LILY_ATOMIC(space)                                                                  \
  template <class T>                                                                        \
  T atomic_load_explicit(space const atomic<T>*, memory_order);                             \
  template <class T, class V>                                                               \
  void atomic_store_explicit(space atomic<T>*, V, memory_order);                            \
  template <class T, class V>                                                               \
  T atomic_exchange_explicit(space atomic<T>*, V, memory_order);                            \
  template <class T, class V>                                                               \
  bool atomic_compare_exchange_weak_explicit(space atomic<T>*, thread T*, V, memory_order, memory_order); \
  template <class T, class V>                                                               \
  T atomic_fetch_add_explicit(space atomic<T>*, V, memory_order);                           \
  template <class T, class V>                                                               \
  T atomic_fetch_sub_explicit(space atomic<T>*, V, memory_order);                           \
  template <class T, class V>                                                               \
  integer<T> atomic_fetch_max_explicit(space atomic<T>*, V, memory_order);                  \
  template <class T, class V>                                                               \
  integer<T> atomic_fetch_min_explicit(space atomic<T>*, V, memory_order);                  \
  template <class T, class V>                                                               \
  integer<T> atomic_fetch_or_explicit(space atomic<T>*, V, memory_order);                   \
  template <class T, class V>                                                               \
  integer<T> atomic_fetch_and_explicit(space atomic<T>*, V, memory_order);
LILY_ATOMIC(device)
LILY_ATOMIC(threadgroup)
#undef LILY_ATOMIC

}  // namespace metal
