// Vectors with Metal's constructors, bit casts, and casts between pointers that keep their address space.
#pragma once

#define LILY_VECTORS(T)                              \
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
#undef LILY_VECTORS

namespace lily {

// Number of components: 1 for a scalar.
template <class T>
struct width {
  static constexpr int value = 1;
  typedef T element;
};
template <class T, int N>
struct width<T __attribute__((ext_vector_type(N)))> {
  static constexpr int value = N;
  typedef T element;
};
template <class... T>
struct total;
template <>
struct total<> {
  static constexpr int value = 0;
};
template <class T, class... R>
struct total<T, R...> {
  static constexpr int value = width<T>::value + total<R...>::value;
};

template <class A, class B>
struct same {
  static constexpr bool value = false;
};
template <class A>
struct same<A, A> {
  static constexpr bool value = true;
};
template <bool, class T = void>
struct enable {};
template <class T>
struct enable<true, T> {
  typedef T type;
};

// float4(...): one scalar or vector of the same width, or components that add up.
template <class V, class... A>
constexpr V make(A...) {
  static_assert(total<A...>::value == width<V>::value || (sizeof...(A) == 1 && total<A...>::value == 1), "vector constructor: wrong number of components");
  return V{};
}

// The address space of what a pointer points to.
template <class T>
struct space {
  static constexpr int value = 0;
};
template <class T>
struct space<__attribute__((address_space(1))) T> {
  static constexpr int value = 1;
};
template <class T>
struct space<__attribute__((address_space(2))) T> {
  static constexpr int value = 2;
};
template <class T>
struct space<__attribute__((address_space(3))) T> {
  static constexpr int value = 3;
};
template <class T>
struct pointee;
template <class T>
struct pointee<T*> {
  typedef T type;
};

// The rewriter turns `(device const uint4*)p` into `pointer_cast<device const uint4*>()->*p`, and a dereference of it into `*pointer_cast<...>()->*p`.
template <class To>
struct dereferenced_cast {};
template <class To>
struct pointer_cast {
  constexpr dereferenced_cast<To> operator*() const { return {}; }
};
template <class To, class From>
constexpr To operator->*(pointer_cast<To>, From* p) {
  static_assert(space<typename pointee<To>::type>::value == space<From>::value, "cast changes the address space");
  return (To)p;
}
template <class To, class From>
constexpr typename pointee<To>::type& operator->*(dereferenced_cast<To>, From* p) {
  return *(pointer_cast<To>()->*p);
}

template <class T>
threadgroup T& threadgroup_memory();

}  // namespace lily

template <class To, class From>
To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type: sizes differ");
  return __builtin_bit_cast(To, from);
}

#define char2(...) lily::make<char2>(__VA_ARGS__)
#define char3(...) lily::make<char3>(__VA_ARGS__)
#define char4(...) lily::make<char4>(__VA_ARGS__)
#define uchar2(...) lily::make<uchar2>(__VA_ARGS__)
#define uchar3(...) lily::make<uchar3>(__VA_ARGS__)
#define uchar4(...) lily::make<uchar4>(__VA_ARGS__)
#define short2(...) lily::make<short2>(__VA_ARGS__)
#define short4(...) lily::make<short4>(__VA_ARGS__)
#define ushort2(...) lily::make<ushort2>(__VA_ARGS__)
#define ushort4(...) lily::make<ushort4>(__VA_ARGS__)
#define int2(...) lily::make<int2>(__VA_ARGS__)
#define int3(...) lily::make<int3>(__VA_ARGS__)
#define int4(...) lily::make<int4>(__VA_ARGS__)
#define uint2(...) lily::make<uint2>(__VA_ARGS__)
#define uint3(...) lily::make<uint3>(__VA_ARGS__)
#define uint4(...) lily::make<uint4>(__VA_ARGS__)
#define ulong2(...) lily::make<ulong2>(__VA_ARGS__)
#define half2(...) lily::make<half2>(__VA_ARGS__)
#define half3(...) lily::make<half3>(__VA_ARGS__)
#define half4(...) lily::make<half4>(__VA_ARGS__)
#define bfloat2(...) lily::make<bfloat2>(__VA_ARGS__)
#define bfloat3(...) lily::make<bfloat3>(__VA_ARGS__)
#define bfloat4(...) lily::make<bfloat4>(__VA_ARGS__)
#define float2(...) lily::make<float2>(__VA_ARGS__)
#define float3(...) lily::make<float3>(__VA_ARGS__)
#define float4(...) lily::make<float4>(__VA_ARGS__)
