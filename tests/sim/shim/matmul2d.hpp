// The part of matmul2d that the kernels use: operands in memory, the result in a cooperative tensor whose layout nobody may know.
#pragma once
#include "tensor.hpp"

#pragma clang attribute push(__attribute__((disable_sanitizer_instrumentation)), apply_to = function)

namespace mpp::tensor_ops {

struct matmul2d_descriptor {
  enum class mode { multiply, multiply_accumulate };
  int m, n, k;
  bool transpose_left, transpose_right, relaxed_precision;
  mode how;
  constexpr matmul2d_descriptor(int rows, int columns, int depth = metal::dynamic_extent, bool left = false, bool right = false, bool relaxed = false, mode does = mode::multiply)
      : m(rows), n(columns), k(depth), transpose_left(left), transpose_right(right), relaxed_precision(relaxed), how(does) {}
};

// Element i of thread t is the flat element i * threads + t, unlike any hardware; not initialised: NaN.
template <class T, int M, int N, unsigned Simds>
struct cooperative_tensor {
  static constexpr unsigned kThreads = Simds * 32;
  static constexpr unsigned kCapacity = (M * N + kThreads - 1) / kThreads;
  T values[kCapacity];
  cooperative_tensor() {
    for (T& v : values) v = T(__builtin_nanf(""));
  }
  static unsigned thread() { return Simds == 1 ? ::lily_sim::lane().index : ::lily_sim::lane().thread; }
  uint get_capacity() const { return kCapacity; }
  bool get_mask(uint i) const { return i < kCapacity && i * kThreads + thread() < unsigned(M * N); }
  bool is_valid_element(uint i) const { return get_mask(i); }
  T& operator[](uint i) {
    if (i >= kCapacity) ::lily_sim::fail("cooperative tensor: element %u of %u", i, kCapacity);
    return values[i];
  }
  // Column and row of an element.
  metal::array<int, 2> get_multidimensional_index(uint i) const {
    const unsigned flat = i * kThreads + thread();
    return {{int(flat % N), int(flat / N)}};
  }
  template <class Tensor>
  __attribute__((noinline)) void store(Tensor target) const {
    const void* site = __builtin_return_address(0);
    (void)::lily_sim::arrive("cooperative_tensor::store", site, 0);
    for (unsigned i = 0; i < kCapacity; i++) {
      const auto at = get_multidimensional_index(i);
      if (!get_mask(i) || !target.inside(at[0], at[1])) continue;
      auto* p = target.at(at[0], at[1]);
      ::lily_sim::touch(p, sizeof *p, ::lily_sim::kWrite, site, sizeof *p);
      *p = static_cast<typename Tensor::element_type>(values[i]);
    }
  }
  template <class Tensor>
  __attribute__((noinline)) void load(Tensor source) {
    const void* site = __builtin_return_address(0);
    (void)::lily_sim::arrive("cooperative_tensor::load", site, 0);
    for (unsigned i = 0; i < kCapacity; i++) {
      const auto at = get_multidimensional_index(i);
      if (!get_mask(i)) continue;
      values[i] = T(0.0f);
      if (!source.inside(at[0], at[1])) continue;
      auto* p = source.at(at[0], at[1]);
      ::lily_sim::touch(p, sizeof *p, ::lily_sim::kRead, site, sizeof *p);
      values[i] = T(*p);
    }
  }
};

template <matmul2d_descriptor D, class Scope>
struct matmul2d {
  static_assert(D.m % 16 == 0 || D.n % 16 == 0, "matmul2d: M or N is a multiple of 16");
  static_assert(D.n % 8 == 0, "matmul2d: N is a multiple of 8");
  static_assert(D.k == metal::dynamic_extent || D.k % 16 == 0, "matmul2d: K is dynamic or a multiple of 16");

  template <class Left, class Right, class T>
  auto get_destination_cooperative_tensor() const {
    return cooperative_tensor<T, D.m, D.n, Scope::count>();
  }

  template <class Left, class Right, class T, int M, int N, unsigned Simds>
  LILY_COLLECTIVE void run(Left& left, Right& right, cooperative_tensor<T, M, N, Simds>& result) const {
    using A = typename Left::value_type;
    using B = typename Right::value_type;
    static_assert(std::is_same_v<A, B>, "matmul2d: both operands have one type");
    static_assert(std::is_same_v<A, bfloat> || std::is_same_v<A, half>, "matmul2d: operands are bfloat or half");
    static_assert(M == D.m && N == D.n && Simds == Scope::count, "matmul2d: the destination belongs to another operation");
    const void* site = __builtin_return_address(0);
    const unsigned simds = ::lily_sim::threads_of_threadgroup() / 32;
    if (Scope::count > 1 && simds != Scope::count) ::lily_sim::fail_at(site, "matmul2d: %u simdgroups run an operation made for execution_simdgroups<%u>", simds, Scope::count);
    ::lily_sim::note_flow(site, left.data, uint64_t(left.strides[1]));
    ::lily_sim::note_flow(site, right.data, uint64_t(right.strides[1]));
    (void)::lily_sim::arrive("matmul2d::run", site, 0);
    if (Scope::count > 1) ::lily_sim::note_group_flow(site, left.data, right.data);
    const long depth = D.k != metal::dynamic_extent ? D.k : left.sizes[D.transpose_left ? 1 : 0];
    read(left, D.transpose_left ? D.m : depth, D.transpose_left ? depth : D.m, site);
    read(right, D.transpose_right ? depth : D.n, D.transpose_right ? D.n : depth, site);
    for (unsigned i = 0; i < result.get_capacity(); i++) {
      if (!result.get_mask(i)) continue;
      const auto at = result.get_multidimensional_index(i);
      float sum = D.how == matmul2d_descriptor::mode::multiply_accumulate ? float(result.values[i]) : 0.0f;
      for (long k = 0; k < depth; k++) {
        const float a = D.transpose_left ? value(left, at[1], k) : value(left, k, at[1]);
        const float b = D.transpose_right ? value(right, k, at[0]) : value(right, at[0], k);
        sum = __builtin_fmaf(a, b, sum);
      }
      result.values[i] = T(sum);
    }
  }

 private:
  template <class Tensor>
  static float value(const Tensor& t, long first, long second) {
    return t.inside(first, second) ? float(*t.at(first, second)) : 0.0f;
  }
  // Which thread reads what is unknown. Every element is read by two threads, so that one of them is not the thread that wrote it.
  template <class Tensor>
  static void read(const Tensor& t, long width, long height, const void* site) {
    constexpr unsigned kThreads = Scope::count * 32;
    const unsigned thread = Scope::count == 1 ? ::lily_sim::lane().index : ::lily_sim::lane().thread;
    width = width < t.sizes[0] ? width : t.sizes[0];
    height = height < t.sizes[1] ? height : t.sizes[1];
    for (unsigned shift : {0u, kThreads / 2 + 1})
      for (long e = (thread + shift) % kThreads; e < width * height; e += kThreads)
        ::lily_sim::touch(t.at(e % width, e / width), sizeof(typename Tensor::value_type), ::lily_sim::kRead, site, sizeof(typename Tensor::value_type));
  }
};

}  // namespace mpp::tensor_ops

#pragma clang attribute pop
