// matmul2d with the shape rules that Apple's headers assert, for the strict check.
#pragma once
#include <metal_tensor>
namespace mpp {
namespace tensor_ops {

struct matmul2d_descriptor {
  enum class mode { multiply, multiply_accumulate };
  int m, n, k;
  bool transpose_left, transpose_right, relaxed_precision;
  mode matmul_mode;
  constexpr matmul2d_descriptor(int m, int n, int k, bool transpose_left = false, bool transpose_right = false, bool relaxed_precision = false,
                                mode matmul_mode = mode::multiply)
      : m(m), n(n), k(k), transpose_left(transpose_left), transpose_right(transpose_right), relaxed_precision(relaxed_precision), matmul_mode(matmul_mode) {}
};

template <class T>
struct cooperative_tensor {
  ushort get_capacity() const;
  bool get_mask(ushort) const;
  thread T& operator[](ushort);
  metal::array<int, 2> get_multidimensional_index(ushort) const;
  template <class To, class Extents, class Kind>
  void store(metal::tensor<To, Extents, Kind>) const {
    static_assert(lily::same<metal::remove_addrspace_t<To>, T>::value, "store: element types differ");
  }
  template <class To, class Extents, class Kind>
  void load(metal::tensor<To, Extents, Kind>);
};

template <matmul2d_descriptor Descriptor, class Scope>
struct matmul2d {
  static_assert(Descriptor.m % 16 == 0 || Descriptor.n % 16 == 0, "matmul2d: M or N must be a multiple of 16");
  static_assert(Descriptor.n % 8 == 0, "matmul2d: N must be a multiple of 8");
  static_assert(Descriptor.k % 16 == 0, "matmul2d: K must be a multiple of 16");
  template <class Left, class Right, class T>
  cooperative_tensor<T> get_destination_cooperative_tensor() const;
  template <class Left, class Right, class T>
  void run(Left&, Right&, thread cooperative_tensor<T>&) const {
    typedef metal::remove_addrspace_t<typename Left::element_type> L;
    typedef metal::remove_addrspace_t<typename Right::element_type> R;
    static_assert(lily::same<L, R>::value, "matmul2d: the operands have different types");
    static_assert(lily::same<L, half>::value || lily::same<L, bfloat>::value, "matmul2d: operands are half or bfloat");
  }
};

}  // namespace tensor_ops
}  // namespace mpp
