// simdgroup_matrix 8x8: two elements a lane. Where a lane's elements lie is Apple's map, or another one when the layout is scrambled.
#pragma once
#include "simd.hpp"

#pragma clang attribute push(__attribute__((disable_sanitizer_instrumentation)), apply_to = function)

namespace lily_sim {

// Row and first column of a lane's two elements.
struct Place {
  uint32_t row, col;
};
inline __attribute__((always_inline)) Place place_of(uint32_t lane_index) {
  if (scrambled_layout()) lane_index = (lane_index * 13 + 7) % kSimdWidth;
  const uint32_t quad = lane_index / 4;
  return {(quad & 4) + (lane_index / 2) % 4, (quad & 2) * 2 + (lane_index % 2) * 2};
}

// Lanes bring {a0, a1, b0, b1, c0, c1} and take {d0, d1} of D = A B + C. In matrix.cpp.
struct Fragments {
  float a[2], b[2], c[2];
};
struct Fragment {
  float d[2];
};
void multiply_8x8(Simd& simd);

}  // namespace lily_sim

namespace metal {

template <class T, int Columns = 8, int Rows = 8>
struct simdgroup_matrix {
  static_assert(Columns == 8 && Rows == 8, "simdgroup_matrix is 8 x 8");
  using element = T;
  vec<T, 2> values;
  // Not initialised: NaN, so that a forgotten zero shows.
  simdgroup_matrix() : values(T(__builtin_nanf(""))) {}
  explicit simdgroup_matrix(T diagonal) {
    const auto p = ::lily_sim::place_of(::lily_sim::lane().index);
    values = vec<T, 2>{p.row == p.col ? diagonal : T(0.0f), p.row == p.col + 1 ? diagonal : T(0.0f)};
  }
  vec<T, 2>& thread_elements() { return values; }
  const vec<T, 2>& thread_elements() const { return values; }
};

typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

template <class T, int C, int R>
inline simdgroup_matrix<T, C, R> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, C, R> m;
  m.values = vec<T, 2>{value, value};
  return m;
}

template <class T>
__attribute__((noinline)) void simdgroup_load(simdgroup_matrix<T, 8, 8>& m, const T* source, ulong elements_per_row = 8, ulong2 origin = ulong2{0, 0}, bool transpose = false) {
  const void* site = __builtin_return_address(0);
  ::lily_sim::note_flow(site, source, elements_per_row);
  const uint lane = ::lily_sim::lane().index;
  const T* base = source + origin.y * elements_per_row + origin.x;
  auto element = [&](::lily_sim::Place p, uint k) __attribute__((always_inline, disable_sanitizer_instrumentation)) {
    const ulong row = transpose ? p.col + k : p.row, col = transpose ? p.row : p.col + k;
    return base + row * elements_per_row + col;
  };
  // For the race checks each lane reads what belongs to its neighbour: no lane may count on finding its own elements without a barrier.
  const auto other = ::lily_sim::place_of((lane + 1) % 32), mine = ::lily_sim::place_of(lane);
  if (transpose) {
    for (uint k = 0; k < 2; k++) ::lily_sim::touch(element(other, k), sizeof(T), ::lily_sim::kRead, site, sizeof(T));
  } else {
    ::lily_sim::touch(element(other, 0), 2 * sizeof(T), ::lily_sim::kRead, site, sizeof(T));
  }
  m.values = vec<T, 2>{*element(mine, 0), *element(mine, 1)};
}

template <class T>
__attribute__((noinline)) void simdgroup_store(const simdgroup_matrix<T, 8, 8>& m, T* target, ulong elements_per_row = 8, ulong2 origin = ulong2{0, 0}, bool transpose = false) {
  const void* site = __builtin_return_address(0);
  ::lily_sim::note_flow(site, target, elements_per_row);
  const auto p = ::lily_sim::place_of(::lily_sim::lane().index);
  T* base = target + origin.y * elements_per_row + origin.x;
  auto element = [&](uint k) __attribute__((always_inline, disable_sanitizer_instrumentation)) {
    return transpose ? base + (p.col + k) * elements_per_row + p.row : base + p.row * elements_per_row + p.col + k;
  };
  if (transpose) {
    for (uint k = 0; k < 2; k++) ::lily_sim::touch(element(k), sizeof(T), ::lily_sim::kWrite, site, sizeof(T));
  } else {
    ::lily_sim::touch(element(0), 2 * sizeof(T), ::lily_sim::kWrite, site, sizeof(T));
  }
  for (uint k = 0; k < 2; k++) *element(k) = m.values[k];
}

template <class D, class A, class B, class C>
LILY_COLLECTIVE void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a, const simdgroup_matrix<B, 8, 8>& b,
                                                   const simdgroup_matrix<C, 8, 8>& c) {
  static_assert(std::is_same_v<A, B>, "both factors have one type");
  static_assert(std::is_same_v<D, C>, "sum and result have one type");
  const ::lily_sim::Fragments mine{{float(a.values[0]), float(a.values[1])}, {float(b.values[0]), float(b.values[1])}, {float(c.values[0]), float(c.values[1])}};
  const auto result = ::lily_sim::meet<::lily_sim::Fragments, ::lily_sim::Fragment>("simdgroup_multiply_accumulate", __builtin_return_address(0), mine, 0,
                                                                                    [](::lily_sim::Simd& s) { ::lily_sim::multiply_8x8(s); });
  d.values = vec<D, 2>{D(result.d[0]), D(result.d[1])};
}

template <class D, class A, class B>
LILY_COLLECTIVE void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a, const simdgroup_matrix<B, 8, 8>& b) {
  const ::lily_sim::Fragments mine{{float(a.values[0]), float(a.values[1])}, {float(b.values[0]), float(b.values[1])}, {0.0f, 0.0f}};
  const auto result = ::lily_sim::meet<::lily_sim::Fragments, ::lily_sim::Fragment>("simdgroup_multiply", __builtin_return_address(0), mine, 0,
                                                                                    [](::lily_sim::Simd& s) { ::lily_sim::multiply_8x8(s); });
  d.values = vec<D, 2>{D(result.d[0]), D(result.d[1])};
}

}  // namespace metal

#pragma clang attribute pop
