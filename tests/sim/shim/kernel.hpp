// The macros of the rewritten source: units, constants, threadgroup arrays, published kernels and how they are called.
#pragma once
#include <type_traits>
#include <utility>

#include "../runtime.hpp"

#pragma clang attribute push(__attribute__((disable_sanitizer_instrumentation)), apply_to = function)

namespace lily {

enum bind_kind {
  bind_buffer,
  bind_thread_position_in_grid,
  bind_thread_position_in_threadgroup,
  bind_threadgroup_position_in_grid,
  bind_thread_index_in_threadgroup,
  bind_thread_index_in_simdgroup,
  bind_simdgroup_index_in_threadgroup,
  bind_threads_per_threadgroup,
  bind_threadgroups_per_grid,
  bind_threads_per_grid,
  bind_simdgroups_per_threadgroup,
  bind_threads_per_simdgroup
};
struct bind {
  bind_kind kind;
  unsigned index;
  const char* name;
  bool writable;
};

}  // namespace lily

namespace lily_sim {

inline Uint3 builtin(lily::bind_kind kind, const Invocation& call) {
  const Uint3 threads = call.threads_per_threadgroup, groups = call.threadgroups_per_grid;
  switch (kind) {
    case lily::bind_thread_position_in_grid: return call.position_in_grid;
    case lily::bind_thread_position_in_threadgroup: return call.position_in_threadgroup;
    case lily::bind_threadgroup_position_in_grid: return call.threadgroup_position;
    case lily::bind_thread_index_in_threadgroup: return {call.thread, 0, 0};
    case lily::bind_thread_index_in_simdgroup: return {call.lane, 0, 0};
    case lily::bind_simdgroup_index_in_threadgroup: return {call.simd, 0, 0};
    case lily::bind_threads_per_threadgroup: return threads;
    case lily::bind_threadgroups_per_grid: return groups;
    case lily::bind_threads_per_grid: return {threads.x * groups.x, threads.y * groups.y, threads.z * groups.z};
    case lily::bind_simdgroups_per_threadgroup: return {threads.x / kSimdWidth, 0, 0};
    case lily::bind_threads_per_simdgroup: return {kSimdWidth, 0, 0};
    default: return {0, 0, 0};
  }
}

template <class P>
P argument(const lily::bind& b, const Invocation& call) {
  if constexpr (std::is_pointer_v<P>) {
    return static_cast<P>(call.buffers[b.index]);
  } else if constexpr (std::is_reference_v<P>) {
    return *static_cast<std::remove_reference_t<P>*>(call.buffers[b.index]);
  } else {
    const Uint3 v = builtin(b.kind, call);
    if constexpr (std::is_arithmetic_v<P>) {
      return static_cast<P>(v.x);
    } else {
      P out{};
      out[0] = v.x;
      out[1] = v.y;
      if constexpr (sizeof(P) > 2 * sizeof(out[0])) out[2] = v.z;
      return out;
    }
  }
}

template <class Bindings, auto Kernel>
struct Thunk;
template <class Bindings, class... P, void (*Kernel)(P...)>
struct Thunk<Bindings, Kernel> {
  static_assert(sizeof...(P) == sizeof(Bindings::b) / sizeof(Bindings::b[0]), "a binding for every parameter");
  template <size_t... I>
  static void call(const Invocation& c, std::index_sequence<I...>) {
    Kernel(argument<P>(Bindings::b[I], c)...);
  }
  static void invoke(const Invocation& c) { call(c, std::index_sequence_for<P...>()); }
  static constexpr uint32_t buffers() {
    uint32_t mask = 0;
    for (const lily::bind& b : Bindings::b)
      if (b.kind == lily::bind_buffer) mask |= 1u << b.index;
    return mask;
  }
};

// One per threadgroup variable and instantiation: its address is the variable's identity.
template <class T>
__attribute__((noinline)) T& threadgroup_variable(const void* key, const char* name) {
  return *static_cast<T*>(threadgroup_array(key, name, sizeof(T), alignof(T), __builtin_return_address(0)));
}

}  // namespace lily_sim

#pragma clang attribute pop

#ifdef LILY_STORAGE_FLOAT32
#define LILY_SIM_STORAGE 1u
#else
#define LILY_SIM_STORAGE 0u
#endif

#define LILY_UNIT_BEGIN namespace {
#define LILY_UNIT_END }
#define LILY_TABLE static const
#define LILY_KERNEL_FUNCTION __attribute__((noinline))
#define LILY_SIM_STRIP(...) __VA_ARGS__
#define LILY_TG(type, name, dims)                       \
  using lily_type_of_##name = LILY_SIM_STRIP type dims; \
  static const char lily_key_of_##name = 0;             \
  lily_type_of_##name& name = ::lily_sim::threadgroup_variable<lily_type_of_##name>(&lily_key_of_##name, #name)
#define LILY_REGISTER(host, bindings, file, line, ...) \
  static const bool lily_registered_##host =           \
      ::lily_sim::register_kernel({#host, file, line, LILY_SIM_STORAGE, ::lily_sim::Thunk<bindings, &__VA_ARGS__>::invoke, ::lily_sim::Thunk<bindings, &__VA_ARGS__>::buffers()})

// A function constant reads storage that the runtime fills before a launch. The kernel sees a constant: no access is checked, loads may move.
#define LILY_FC(type, name, index) static constexpr const type& name = ::lily_fc_##type##_##index
#define LILY_FC_DECLARE(i)                                           \
  extern const bool lily_fc_bool_##i __asm__(LILY_FC_SYMBOL(i));     \
  extern const unsigned lily_fc_uint_##i __asm__(LILY_FC_SYMBOL(i)); \
  extern const int lily_fc_int_##i __asm__(LILY_FC_SYMBOL(i));       \
  extern const float lily_fc_float_##i __asm__(LILY_FC_SYMBOL(i));
#ifdef __APPLE__
#define LILY_FC_SYMBOL(i) "_lily_fc_" #i
#else
#define LILY_FC_SYMBOL(i) "lily_fc_" #i
#endif
#define LILY_FC_EACH(do)                                                                                                                                                        \
  do                                                                                                                                                                            \
  (0) do(1) do(2) do(3) do(4) do(5) do(6) do(7) do(8) do(9) do(10) do(11) do(12) do(13) do(14) do(15) do(16) do(17) do(18) do(19) do(20) do(21) do(22) do(23) do(24) do(25) do( \
      26) do(27) do(28) do(29) do(30) do(31)
LILY_FC_EACH(LILY_FC_DECLARE)
#undef LILY_FC_DECLARE
