// Seeded mistakes for the lint and the strict check. "//---" starts a source of its own; "// <-" names the rule that must catch the line, or "clang:" and
// what clang must say. Nothing else may be reported. Each source starts with the standard header and `using namespace metal`.

//--- a parameter without an attribute
kernel void f(device float* x [[buffer(0)]],
              device float* y,  // <- attribute-missing
              uint i [[thread_position_in_grid]]) { y[i] = x[i]; }
LILY_INSTANTIATE(f, f)

//--- an attribute outside of the subset
kernel void f(device float* y [[buffer(0)]], uint i [[dispatch_threads_per_threadgroup]]) { y[i] = 0.0f; }  // <- attribute-unknown
LILY_INSTANTIATE(f, f)

//--- a buffer index that is not a number
constant constexpr uint FIRST = 0;
kernel void f(device float* y [[buffer(FIRST)]], uint i [[thread_position_in_grid]]) { y[i] = 0.0f; }  // <- attribute-unknown
LILY_INSTANTIATE(f, f)

//--- two buffers at one index
kernel void f(device const float* x [[buffer(0)]],
              device float* y [[buffer(1)]],
              device float* z [[buffer(1)]],  // <- attribute-duplicate
              uint i [[thread_position_in_grid]]) { y[i] = z[i] + x[i]; }
LILY_INSTANTIATE(f, f)

//--- two attributes on one parameter
kernel void f(device float* y [[buffer(0)]] [[buffer(1)]], uint i [[thread_position_in_grid]]) { y[i] = 0.0f; }  // <- attribute-duplicate
LILY_INSTANTIATE(f, f)

//--- threadgroup memory as an argument
kernel void f(device float* y [[buffer(0)]], threadgroup float* s [[threadgroup(0)]], uint i [[thread_position_in_grid]]) { y[i] = s[i]; }  // <- attribute-unknown
LILY_INSTANTIATE(f, f)

//--- an address space that a buffer cannot have
kernel void f(threadgroup float* y [[buffer(0)]], uint i [[thread_position_in_grid]]) { y[i] = 0.0f; }  // <- address-space
LILY_INSTANTIATE(f, f)

//--- a pointer parameter without an address space
inline float first(const float* x) { return x[0]; }  // <- address-space

//--- a local pointer without an address space
kernel void f(device float* y [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  const float* p = y + i;  // <- address-space
  y[i] = p[0];
}
LILY_INSTANTIATE(f, f)

//--- a local reference without an address space
kernel void f(device float* y [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  float& v = y[i];  // <- address-space
  v = 1.0f;
}
LILY_INSTANTIATE(f, f)

//--- a cast to a pointer without an address space
kernel void f(device float* y [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  y[i] = float(((const uint*)y)[i]);  // <- address-space
}
LILY_INSTANTIATE(f, f)

//--- a struct with a pointer without an address space
struct View {
  float* data;  // <- address-space
  uint rows;
};

//--- a cast that changes the address space
kernel void f(device float* y [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  threadgroup float* s = (threadgroup float*)y;  // <- address-space-cast
  s[i] = 0.0f;
}
LILY_INSTANTIATE(f, f)

//--- a threadgroup variable in a helper
inline float total(float v, uint lane) {
  threadgroup float s[32];  // <- threadgroup-variable
  s[lane] = v;
  return s[0];
}

//--- a threadgroup variable in a nested block
kernel void f(device float* y [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  if (y[i] > 0.0f) {
    threadgroup float s[32];  // <- threadgroup-variable
    s[i] = y[i];
  }
}
LILY_INSTANTIATE(f, f)

//--- a threadgroup variable with an initialiser
kernel void f(device float* y [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  threadgroup float s[2] = {0.0f, 0.0f};  // <- threadgroup-variable
  y[i] = s[0];
}
LILY_INSTANTIATE(f, f)

//--- recursion through a second function
inline uint odd(uint n);
inline uint even(uint n) { return n == 0 ? 1 : odd(n - 1); }  // <- recursion
inline uint odd(uint n) { return n == 0 ? 0 : even(n - 1); }  // <- recursion

//--- goto
inline uint f(uint n) {
  if (n > 3) goto end;  // <- word
  n += 1;
end:
  return n;
}

//--- a lambda
inline float f(float x) {
  auto twice = [=](float v) { return v * 2.0f; };  // <- lambda
  return twice(x);
}

//--- double
inline float f(float x) {
  double sum = x;  // <- word
  return float(sum);
}

//--- long double
inline float f(long double x) { return float(x); }  // <- word

//--- a literal of half precision
inline half f(half x) { return x * 1.0h; }  // <- literal

//--- a literal without a suffix
inline float f(float x) { return x * 0.5; }  // <- literal

//--- a swizzle
inline float2 f(float4 v) { return v.xy; }  // <- swizzle

//--- three-component vectors in a buffer
kernel void f(device float3* y [[buffer(0)]], uint i [[thread_position_in_grid]]) { y[i] = float3(0.0f); }  // <- vec3
LILY_INSTANTIATE(f, f)

//--- three-component vectors in a struct
struct Row {
  float3 position;  // <- vec3
  float weight;
};

//--- the C++ library
inline float f(float x) { return std::max(x, 0.0f); }  // <- std

//--- a helper that is not inline
float f(float x) { return x + 1.0f; }  // <- inline

//--- a name that is a word of Metal
inline float f(float x) {
  float device = x;  // <- reserved-name
  return x;
}

//--- a parameter called kernel
inline float f(float x, uint kernel) { return x * float(kernel); }  // <- reserved-name

//--- static_assert without a message
static_assert(sizeof(uint) == 4);  // <- static-assert

//--- a macro with parameters
#define SQUARE(x) ((x) * (x))  // <- macro

//--- code for one compiler
#ifdef __clang__  // <- condition
constant constexpr uint LANES = 32;
#endif

//--- a header outside of the subset
#include <metal_raytracing>  // <- include

//--- a header that does not exist
#include "no_such_header.h"  // <- include

//--- a variable at namespace scope
uint counter = 0;  // <- program-scope

//--- a static variable in a kernel
kernel void f(device float* y [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  static uint calls;  // <- static
  y[i] = float(calls);
}
LILY_INSTANTIATE(f, f)

//--- overloads that differ in address spaces only
inline float first(device const float* x) { return x[0]; }
inline float first(threadgroup const float* x) { return x[0]; }  // <- overload

//--- function constants with one index
constant uint A [[function_constant(2)]];
constant uint B [[function_constant(2)]];  // <- function-constant

//--- a kernel that is never published
kernel void f(device float* y [[buffer(0)]], uint i [[thread_position_in_grid]]) { y[i] = 0.0f; }  // <- instantiate

//--- one host name for two kernels
template <typename T>
kernel void f(device T* y [[buffer(0)]], uint i [[thread_position_in_grid]]) { y[i] = T(0); }
LILY_INSTANTIATE(f, f, float)
LILY_INSTANTIATE(f, f, half)  // <- instantiate

//--- a function to be published that is no kernel
LILY_INSTANTIATE(g, g)  // <- instantiate

//--- a matrix of another size
#include <metal_simdgroup_matrix>
inline void f(thread simdgroup_matrix<float, 16, 16>& m) { m = make_filled_simdgroup_matrix<float, 16, 16>(0.0f); }  // <- matrix-size

//--- a kernel that depends on the layout of a fragment
#include <metal_simdgroup_matrix>
inline float f(thread simdgroup_matrix<float, 8, 8>& m) { return m.thread_elements()[0]; }  // <- matrix-layout

//--- a collective in a branch of ?:
inline float f(float x, uint lane) { return lane < 8 ? simd_sum(x) : 0.0f; }  // <- collective

//--- a helper with a collective behind &&
inline bool is_largest(float x) {
  const float most = simd_max(x);
  return x == most;
}
inline bool f(float x, uint lane) {
  return lane < 8 && is_largest(x);  // <- collective
}

//--- threadgroup memory for a device argument
inline float first(device const float* x) { return x[0]; }
kernel void f(device float* y [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  threadgroup float s[32];
  s[i] = y[i];
  y[i] = first(s);  // <- clang: no matching function
}
LILY_INSTANTIATE(f, f)

//--- a device pointer that points to threadgroup memory
kernel void f(device float* y [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  threadgroup float s[32];
  device float* p = s;  // <- clang: cannot initialize a variable
  p[i] = y[i];
}
LILY_INSTANTIATE(f, f)

//--- a write to a constant
kernel void f(device float* y [[buffer(0)]], constant uint& n [[buffer(1)]], uint i [[thread_position_in_grid]]) {
  n = 3;  // <- clang: const-qualified
  y[i] = float(n);
}
LILY_INSTANTIATE(f, f)

//--- a write to a buffer that is only read
kernel void f(device const float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  x[i] = 1.0f;  // <- clang: read-only
}
LILY_INSTANTIATE(f, f)

//--- a cast of an expression that changes the address space
inline device float* moved(device float* p) { return p; }
kernel void f(device float* y [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  threadgroup float* s = (threadgroup float*)(moved(y) + i);  // <- clang: cast changes the address space
  s[0] = 0.0f;
}
LILY_INSTANTIATE(f, f)

//--- a struct copied out of constant memory
struct Shape {
  uint rows, cols;
};
kernel void f(device uint* y [[buffer(0)]], constant Shape& shape [[buffer(1)]], uint i [[thread_position_in_grid]]) {
  Shape s = shape;  // <- clang: no matching constructor
  y[i] = s.rows * s.cols;
}
LILY_INSTANTIATE(f, f)

//--- a member function of an object in device memory
struct Cell {
  uint value;
  inline uint twice() { return value * 2; }
};
kernel void f(device Cell* cells [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  cells[i].value = cells[i].twice();  // <- clang: cannot initialize object parameter
}
LILY_INSTANTIATE(f, f)

//--- a vector of too few components
kernel void f(device float4* y [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  y[i] = float4(1.0f, 2.0f, 3.0f);  // <- clang: wrong number of components
}
LILY_INSTANTIATE(f, f)

//--- a function constant as the size of an array
constant uint ROWS [[function_constant(3)]];
kernel void f(device float* y [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  float sums[ROWS];  // <- clang: variable length array
  sums[0] = y[i];
  y[i] = sums[0];
}
LILY_INSTANTIATE(f, f)

//--- matrices of two types multiplied
#include <metal_simdgroup_matrix>
inline void f(thread simdgroup_matrix<float, 8, 8>& c, thread simdgroup_matrix<half, 8, 8>& a, thread simdgroup_matrix<bfloat, 8, 8>& b) {
  simdgroup_multiply_accumulate(c, a, b, c);  // <- clang: no matching function
}

//--- a collective on a type that simdgroups do not exchange
inline bfloat f(bfloat v) {
  return simd_sum(v);  // <- clang: no matching function
}

//--- a tensor product whose shape no tensor unit takes
#include <metal_tensor>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
inline void f() {
  mpp::tensor_ops::matmul2d<mpp::tensor_ops::matmul2d_descriptor(32, 64, 24), execution_simdgroups<4>> product;  // <- clang: K must be a multiple of 16
  (void)product;
}
