// When a C type that the Metal device sends stands for the type that metal-cpp sends: of the same kind and size.
// Included by the file that prove_messages.py writes, after metal-cpp's headers and before messages.inc.
#pragma once
#include <cstdint>
#include <type_traits>

struct AnyObject;
using Object = AnyObject*;
struct MtlSize {
  uint64_t width, height, depth;
};

namespace proof {

template <class T> constexpr bool is_block = false;
template <class R, class... A> constexpr bool is_block<R (^)(A...)> = true;

// An object, a block or a class; not any other pointer.
template <class T> constexpr bool is_object() {
  if constexpr (is_block<T>) {
    return true;
  } else if constexpr (std::is_pointer_v<T> && std::is_class_v<std::remove_pointer_t<T>>) {
    return std::is_base_of_v<objc_object, std::remove_cv_t<std::remove_pointer_t<T>>>;
  } else {
    return std::is_same_v<T, ::Class>;
  }
}

// The integer that an enumeration is sent as.
template <class T, bool = std::is_enum_v<T>> struct IntegerOf {
  using type = T;
};
template <class T> struct IntegerOf<T, true> {
  using type = std::underlying_type_t<T>;
};

template <class Ours, class Sent> constexpr bool agree_one() {
  using Theirs = std::remove_cv_t<Sent>;
  if constexpr (std::is_same_v<Ours, Object>) {
    return is_object<Theirs>();
  } else if constexpr (std::is_same_v<Ours, Object*>) {
    if constexpr (std::is_pointer_v<Theirs>) return is_object<std::remove_cv_t<std::remove_pointer_t<Theirs>>>();
    return false;
  } else if constexpr (std::is_same_v<Ours, MtlSize>) {
    return std::is_same_v<Theirs, MTL::Size> && sizeof(MTL::Size) == sizeof(MtlSize) && sizeof(MTL::Size::width) == sizeof(MtlSize::width);
  } else if constexpr (std::is_same_v<Ours, uint64_t> || std::is_same_v<Ours, int64_t>) {
    using Integer = typename IntegerOf<Theirs>::type;
    return std::is_integral_v<Integer> && !std::is_same_v<Integer, bool> && sizeof(Integer) == sizeof(Ours) && std::is_signed_v<Integer> == std::is_signed_v<Ours>;
  } else {
    return std::is_same_v<Ours, Theirs>;  // void, bool, double, float, plain pointers
  }
}

template <class Ours, class Theirs> struct Agree;
template <class R, class S, class... A, class... B> struct Agree<R(A...), S(B...)> {
  static constexpr bool count = sizeof...(A) == sizeof...(B);
  static constexpr bool types = [] {
    if constexpr (count) return (agree_one<R, S>() && ... && agree_one<A, B>());
    return true;
  }();
};

// The type of the member function that takes and gives these, chosen among those of its name.
template <class R, class... A> struct Chosen {
  template <class C> static R (*of(R (C::*)(A...)))(A...);
  template <class C> static R (*of(R (C::*)(A...) const))(A...);
  static R (*of(R (*)(A...)))(A...);
};

}  // namespace proof
