// Tensors over memory: dimension 0 runs fastest. Reads outside of the extents give 0, writes there are dropped.
#pragma once
#include "simd.hpp"

#pragma clang attribute push(__attribute__((disable_sanitizer_instrumentation)), apply_to = function)

namespace metal {

constexpr int dynamic_extent = -1;

template <class Index, int Rank>
struct dextents {
  static_assert(Rank == 2, "only tensors of rank 2");
  Index sizes[2];
  constexpr dextents(Index first, Index second) : sizes{first, second} {}
  constexpr Index extent(int i) const { return sizes[i]; }
};
template <class Index, int First, int Second>
struct extents {
  Index sizes[2];
  constexpr extents() : sizes{First, Second} {}
  constexpr Index extent(int i) const { return sizes[i]; }
};
template <class T, int N>
struct array {
  T items[N];
  constexpr T operator[](int i) const { return items[i]; }
};

struct tensor_inline {};
struct tensor_handle {};
template <class T>
struct remove_addrspace {
  using type = T;
};
template <class T>
using remove_addrspace_t = T;

template <class T, class Extents = dextents<int, 2>, class Descriptor = tensor_inline>
struct tensor {
  using element_type = T;
  using value_type = std::remove_const_t<T>;
  T* data;
  long sizes[2];
  long strides[2];

  tensor(T* memory, Extents shape) : data(memory), sizes{shape.extent(0), shape.extent(1)}, strides{1, shape.extent(0)} {}
  template <class I>
  tensor(T* memory, Extents shape, array<I, 2> steps) : data(memory), sizes{shape.extent(0), shape.extent(1)}, strides{steps[0], steps[1]} {
    if (strides[0] != 1) ::lily_sim::fail("tensor: the stride of dimension 0 is %ld, expected 1", strides[0]);
  }
  int get_extent(int i) const { return int(sizes[i]); }

  // The part from (first, second) on.
  __attribute__((noinline)) tensor slice(long first, long second) const {
    if (first < 0 || second < 0) ::lily_sim::fail_at(__builtin_return_address(0), "tensor: slice at (%ld, %ld)", first, second);
    tensor part = *this;
    part.data += first * strides[0] + second * strides[1];
    part.sizes[0] = sizes[0] > first ? sizes[0] - first : 0;
    part.sizes[1] = sizes[1] > second ? sizes[1] - second : 0;
    return part;
  }
  bool inside(long first, long second) const { return first < sizes[0] && second < sizes[1]; }
  T* at(long first, long second) const { return data + first * strides[0] + second * strides[1]; }
};
template <class T, class I>
tensor(T*, dextents<I, 2>) -> tensor<T, dextents<I, 2>>;
template <class T, class I, class J>
tensor(T*, dextents<I, 2>, array<J, 2>) -> tensor<T, dextents<I, 2>>;

template <int N>
struct execution_simdgroups {
  static constexpr unsigned count = N;
};
using execution_simdgroup = execution_simdgroups<1>;

}  // namespace metal

#pragma clang attribute pop
