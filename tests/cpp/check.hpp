// Assertions and the list of tests. A failed check ends its test with an exception; main.cpp counts and prints.
#pragma once
#include <cstdint>
#include <functional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace lily::test {

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Test {
  const char* name;
  std::function<void()> run;
};

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

struct Registration {
  Registration(const char* name, std::function<void()> run) { tests().push_back({name, std::move(run)}); }
};

[[noreturn]] inline void fail(const char* file, int line, const std::string& what) {
  throw Failure(std::string(file) + ":" + std::to_string(line) + ": " + what);
}

template <class T>
std::string show(const T& value) {
  if constexpr (requires(std::ostringstream& s) { s << value; }) {
    std::ostringstream s;
    s << value;
    return s.str();
  } else {
    return "(value)";
  }
}

}  // namespace lily::test

#define LILY_TEST(name)                                                        \
  static void test_##name();                                                   \
  static const ::lily::test::Registration registered_##name(#name, test_##name); \
  static void test_##name()

#define CHECK(condition) \
  do {                   \
    if (!(condition)) ::lily::test::fail(__FILE__, __LINE__, #condition); \
  } while (0)

#define CHECK_EQUAL(a, b)                                                                                                       \
  do {                                                                                                                          \
    const auto& left_ = (a);                                                                                                    \
    const auto& right_ = (b);                                                                                                   \
    if (!(left_ == right_))                                                                                                     \
      ::lily::test::fail(__FILE__, __LINE__, #a " == " #b ": " + ::lily::test::show(left_) + " and " + ::lily::test::show(right_)); \
  } while (0)

#define CHECK_THROWS(type, expression)                                              \
  do {                                                                              \
    bool thrown_ = false;                                                           \
    try {                                                                           \
      expression;                                                                   \
    } catch (const type&) {                                                         \
      thrown_ = true;                                                               \
    }                                                                               \
    if (!thrown_) ::lily::test::fail(__FILE__, __LINE__, #expression " did not throw " #type); \
  } while (0)
