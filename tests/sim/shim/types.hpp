// Scalars and vectors of Metal. Vectors are clang's own, so that a vector load is one instruction and one access.
#pragma once
#include <cstdint>
#include <type_traits>

using uchar = unsigned char;
using ushort = unsigned short;
using uint = unsigned int;
using ulong = unsigned long;
using half = _Float16;
using bfloat = __bf16;

#define LILY_VECTORS(T)                               \
  typedef T T##2 __attribute__((ext_vector_type(2))); \
  typedef T T##3 __attribute__((ext_vector_type(3))); \
  typedef T T##4 __attribute__((ext_vector_type(4)));
LILY_VECTORS(char)
LILY_VECTORS(uchar)
LILY_VECTORS(short)
LILY_VECTORS(ushort)
LILY_VECTORS(int)
LILY_VECTORS(uint)
LILY_VECTORS(long)
LILY_VECTORS(ulong)
LILY_VECTORS(half)
LILY_VECTORS(bfloat)
LILY_VECTORS(float)
LILY_VECTORS(bool)
#undef LILY_VECTORS

namespace lily_sim {

template <class T>
struct VectorOf {
  using Element = T;
  static constexpr int kCount = 0;
};
template <class T, int N>
struct VectorType;
#define LILY_VECTOR(T, N)            \
  template <>                        \
  struct VectorOf<T##N> {            \
    using Element = T;               \
    static constexpr int kCount = N; \
  };                                 \
  template <>                        \
  struct VectorType<T, N> {          \
    using type = T##N;               \
  };
#define LILY_VECTORS(T) LILY_VECTOR(T, 2) LILY_VECTOR(T, 3) LILY_VECTOR(T, 4)
LILY_VECTORS(char)
LILY_VECTORS(uchar)
LILY_VECTORS(short)
LILY_VECTORS(ushort)
LILY_VECTORS(int)
LILY_VECTORS(uint)
LILY_VECTORS(long)
LILY_VECTORS(ulong)
LILY_VECTORS(half)
LILY_VECTORS(bfloat)
LILY_VECTORS(float)
LILY_VECTORS(bool)
#undef LILY_VECTORS
#undef LILY_VECTOR

template <class T>
constexpr bool is_vector = VectorOf<T>::kCount > 0;

// V(a, b, ...): as many components as V has, or one for all, or another vector converted.
template <class V, class... A>
inline __attribute__((always_inline)) V make(A... parts) {
  using Element = typename VectorOf<V>::Element;
  if constexpr (sizeof...(A) == 0) {
    return V{};
  } else if constexpr (sizeof...(A) == 1) {
    if constexpr ((is_vector<A> && ...)) {
      return __builtin_convertvector((parts, ...), V);
    } else {
      return V((static_cast<Element>(parts), ...));
    }
  } else {
    static_assert(((is_vector<A> ? VectorOf<A>::kCount : 1) + ...) == VectorOf<V>::kCount, "components of the vector");
    V v{};
    int at = 0;
    auto put = [&](auto part) __attribute__((always_inline)) {
      if constexpr (is_vector<decltype(part)>) {
        for (int i = 0; i < VectorOf<decltype(part)>::kCount; i++) v[at++] = static_cast<Element>(part[i]);
      } else {
        v[at++] = static_cast<Element>(part);
      }
    };
    (put(parts), ...);
    return v;
  }
}

}  // namespace lily_sim

namespace metal {

using ::bfloat;
using ::half;
using size_t = ::size_t;

template <class T, int N>
using vec = typename lily_sim::VectorType<T, N>::type;

typedef struct {
  float x, y, z;
} packed_float3;
typedef float4 packed_float4 __attribute__((aligned(4)));
typedef float2 packed_float2 __attribute__((aligned(4)));
typedef uint4 packed_uint4 __attribute__((aligned(4)));
typedef uint2 packed_uint2 __attribute__((aligned(4)));
typedef ushort4 packed_ushort4 __attribute__((aligned(2)));
typedef bfloat4 packed_bfloat4 __attribute__((aligned(2)));
typedef half4 packed_half4 __attribute__((aligned(2)));

template <class To, class From>
inline __attribute__((always_inline)) To as_type(From value) {
  static_assert(sizeof(To) == sizeof(From), "as_type keeps the size");
  return __builtin_bit_cast(To, value);
}

using std::conditional_t;
using std::enable_if_t;
using std::is_same;
using std::is_same_v;

}  // namespace metal
using metal::as_type;
using metal::vec;

#define float2(...) ::lily_sim::make<::float2>(__VA_ARGS__)
#define float3(...) ::lily_sim::make<::float3>(__VA_ARGS__)
#define float4(...) ::lily_sim::make<::float4>(__VA_ARGS__)
#define half2(...) ::lily_sim::make<::half2>(__VA_ARGS__)
#define half3(...) ::lily_sim::make<::half3>(__VA_ARGS__)
#define half4(...) ::lily_sim::make<::half4>(__VA_ARGS__)
#define bfloat2(...) ::lily_sim::make<::bfloat2>(__VA_ARGS__)
#define bfloat3(...) ::lily_sim::make<::bfloat3>(__VA_ARGS__)
#define bfloat4(...) ::lily_sim::make<::bfloat4>(__VA_ARGS__)
#define int2(...) ::lily_sim::make<::int2>(__VA_ARGS__)
#define int3(...) ::lily_sim::make<::int3>(__VA_ARGS__)
#define int4(...) ::lily_sim::make<::int4>(__VA_ARGS__)
#define uint2(...) ::lily_sim::make<::uint2>(__VA_ARGS__)
#define uint3(...) ::lily_sim::make<::uint3>(__VA_ARGS__)
#define uint4(...) ::lily_sim::make<::uint4>(__VA_ARGS__)
#define short2(...) ::lily_sim::make<::short2>(__VA_ARGS__)
#define short3(...) ::lily_sim::make<::short3>(__VA_ARGS__)
#define short4(...) ::lily_sim::make<::short4>(__VA_ARGS__)
#define ushort2(...) ::lily_sim::make<::ushort2>(__VA_ARGS__)
#define ushort3(...) ::lily_sim::make<::ushort3>(__VA_ARGS__)
#define ushort4(...) ::lily_sim::make<::ushort4>(__VA_ARGS__)
#define char2(...) ::lily_sim::make<::char2>(__VA_ARGS__)
#define char3(...) ::lily_sim::make<::char3>(__VA_ARGS__)
#define char4(...) ::lily_sim::make<::char4>(__VA_ARGS__)
#define uchar2(...) ::lily_sim::make<::uchar2>(__VA_ARGS__)
#define uchar3(...) ::lily_sim::make<::uchar3>(__VA_ARGS__)
#define uchar4(...) ::lily_sim::make<::uchar4>(__VA_ARGS__)
#define long2(...) ::lily_sim::make<::long2>(__VA_ARGS__)
#define long3(...) ::lily_sim::make<::long3>(__VA_ARGS__)
#define long4(...) ::lily_sim::make<::long4>(__VA_ARGS__)
#define ulong2(...) ::lily_sim::make<::ulong2>(__VA_ARGS__)
#define ulong3(...) ::lily_sim::make<::ulong3>(__VA_ARGS__)
#define ulong4(...) ::lily_sim::make<::ulong4>(__VA_ARGS__)
#define bool2(...) ::lily_sim::make<::bool2>(__VA_ARGS__)
#define bool3(...) ::lily_sim::make<::bool3>(__VA_ARGS__)
#define bool4(...) ::lily_sim::make<::bool4>(__VA_ARGS__)
