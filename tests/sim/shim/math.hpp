// metal:: mathematics with IEEE rounding; vectors go component by component.
// Through the compiler's own functions: <cmath> of libc++ puts overloads of fma and others beside the unqualified names of a kernel.
#pragma once
#include <limits>

#include "types.hpp"

namespace metal {

#define LILY_UNARY(name, call)                                                        \
  inline __attribute__((always_inline)) float name(float x) { return call; }          \
  template <class V, class = std::enable_if_t<lily_sim::is_vector<V>>>                \
  inline __attribute__((always_inline)) V name(V v) {                                 \
    for (int i = 0; i < lily_sim::VectorOf<V>::kCount; i++) v[i] = name(float(v[i])); \
    return v;                                                                         \
  }
#define LILY_UNARIES           \
  LILY_UNARY(exp, __builtin_expf(x))   \
  LILY_UNARY(exp2, __builtin_exp2f(x)) \
  LILY_UNARY(log, __builtin_logf(x))   \
  LILY_UNARY(log2, __builtin_log2f(x)) \
  LILY_UNARY(sin, __builtin_sinf(x))   \
  LILY_UNARY(cos, __builtin_cosf(x))   \
  LILY_UNARY(tan, __builtin_tanf(x))   \
  LILY_UNARY(tanh, __builtin_tanhf(x)) \
  LILY_UNARY(sqrt, __builtin_sqrtf(x)) \
  LILY_UNARY(rsqrt, 1.0f / __builtin_sqrtf(x))

LILY_UNARIES
LILY_UNARY(floor, __builtin_floorf(x))
LILY_UNARY(ceil, __builtin_ceilf(x))
LILY_UNARY(round, __builtin_roundf(x))
LILY_UNARY(rint, __builtin_rintf(x))
LILY_UNARY(trunc, __builtin_truncf(x))
LILY_UNARY(fabs, __builtin_fabsf(x))
LILY_UNARY(log1p_, __builtin_log1pf(x))
LILY_UNARY(exp10, __builtin_powf(10.0f, x))
LILY_UNARY(log10, __builtin_log10f(x))
LILY_UNARY(saturate, __builtin_fminf(__builtin_fmaxf(x, 0.0f), 1.0f))

inline __attribute__((always_inline)) float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
template <class V, class = std::enable_if_t<lily_sim::is_vector<V>>>
inline __attribute__((always_inline)) V fma(V a, V b, V c) {
  for (int i = 0; i < lily_sim::VectorOf<V>::kCount; i++) a[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return a;
}
inline float pow(float a, float b) { return __builtin_powf(a, b); }
inline float powr(float a, float b) { return __builtin_powf(a, b); }
inline float fmod(float a, float b) { return __builtin_fmodf(a, b); }
inline float copysign(float a, float b) { return __builtin_copysignf(a, b); }
inline float ldexp(float a, int n) { return __builtin_ldexpf(a, n); }
inline float atan2(float a, float b) { return __builtin_atan2f(a, b); }
inline __attribute__((always_inline)) float fmin(float a, float b) { return __builtin_fminf(a, b); }
inline __attribute__((always_inline)) float fmax(float a, float b) { return __builtin_fmaxf(a, b); }

namespace fast {
LILY_UNARIES
inline float pow(float a, float b) { return __builtin_powf(a, b); }
inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float divide(float a, float b) { return a / b; }
}  // namespace fast
namespace precise {
LILY_UNARIES
inline float pow(float a, float b) { return __builtin_powf(a, b); }
inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float divide(float a, float b) { return a / b; }
}  // namespace precise
#undef LILY_UNARIES
#undef LILY_UNARY

inline float divide(float a, float b) { return a / b; }
inline bool isnan(float x) { return x != x; }
inline bool isinf(float x) { return __builtin_isinf(x); }
inline bool isfinite(float x) { return __builtin_isfinite(x); }
inline bool signbit(float x) { return __builtin_signbit(x); }

template <class T>
inline __attribute__((always_inline)) T min(T a, T b) {
  if constexpr (lily_sim::is_vector<T>) {
    for (int i = 0; i < lily_sim::VectorOf<T>::kCount; i++) a[i] = metal::min(a[i], b[i]);
    return a;
  } else if constexpr (std::is_same_v<T, float>) {
    return __builtin_fminf(a, b);
  } else {
    return b < a ? b : a;
  }
}
template <class T>
inline __attribute__((always_inline)) T max(T a, T b) {
  if constexpr (lily_sim::is_vector<T>) {
    for (int i = 0; i < lily_sim::VectorOf<T>::kCount; i++) a[i] = metal::max(a[i], b[i]);
    return a;
  } else if constexpr (std::is_same_v<T, float>) {
    return __builtin_fmaxf(a, b);
  } else {
    return a < b ? b : a;
  }
}
template <class T>
inline __attribute__((always_inline)) T clamp(T x, T low, T high) {
  return metal::min(metal::max(x, low), high);
}
template <class T>
inline __attribute__((always_inline)) T abs(T x) {
  if constexpr (std::is_same_v<T, float>)
    return __builtin_fabsf(x);
  else
    return x < T(0) ? T(-x) : x;
}
template <class T>
inline T mix(T a, T b, T t) {
  return a + (b - a) * t;
}
template <class T>
inline __attribute__((always_inline)) T select(T a, T b, bool c) {
  return c ? b : a;
}
template <class V>
inline __attribute__((always_inline)) auto dot(V a, V b) {
  typename lily_sim::VectorOf<V>::Element sum = a[0] * b[0];
  for (int i = 1; i < lily_sim::VectorOf<V>::kCount; i++) sum += a[i] * b[i];
  return sum;
}

inline uint popcount(uint x) { return uint(__builtin_popcount(x)); }
inline int popcount(int x) { return __builtin_popcount(uint(x)); }
inline uint clz(uint x) { return x ? uint(__builtin_clz(x)) : 32u; }
inline int clz(int x) { return x ? __builtin_clz(uint(x)) : 32; }
inline uint ctz(uint x) { return x ? uint(__builtin_ctz(x)) : 32u; }
inline int ctz(int x) { return x ? __builtin_ctz(uint(x)) : 32; }
inline uint mulhi(uint a, uint b) { return uint((ulong(a) * b) >> 32); }
inline uint reverse_bits(uint x) { return __builtin_bitreverse32(x); }
inline uint rotate(uint x, uint n) { return (x << (n & 31)) | (x >> ((32 - n) & 31)); }
inline uint extract_bits(uint x, uint offset, uint bits) { return bits >= 32 ? x >> offset : (x >> offset) & ((1u << bits) - 1); }

template <class T>
using numeric_limits = std::numeric_limits<T>;

}  // namespace metal

#ifndef INFINITY
#define INFINITY __builtin_inff()
#endif
#define M_PI_F 3.14159265358979323846f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LN2_F 0.693147180559945309417f
#undef MAXFLOAT
#define MAXFLOAT 3.402823466e+38f
