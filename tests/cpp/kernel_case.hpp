// A kernel's dispatch as a test describes it: arguments and buffers of exactly the size that the contract names. It runs on any
// instruction set and storage, from the heap (so that the address sanitizer sees an overrun by a byte) or with each buffer's end at a
// page that must not be touched (so that gathers and wide vector loads, of which the sanitizer misses some, fault).
#pragma once
#include <cstring>
#include <string>
#include <vector>

#include "args.h"
#include "device/cpu/cpu_device.hpp"

namespace lily::test {

// act: stored as the storage asks. record: words that are either integers or floats. packed: a weight's bytes, at an odd address.
enum class Type { f32, act, u32, record, packed };
enum class Role { absent, in, out, inout, scratch };

struct Operand {
  Role role = Role::absent;
  Type type = Type::f32;
  std::vector<uint8_t> bytes;  // act as float32
};

using Floats = std::vector<float>;
using Words = std::vector<uint32_t>;

Operand absent();
Operand floats(const Floats& values, Role role = Role::in);
Operand acts(const Floats& values, Role role = Role::in);
Operand words(const Words& values, Role role = Role::in);
Operand packed(const std::vector<uint8_t>& bytes);
template <class T>
Operand record(const T& value, Role role = Role::in) {
  Operand o{role, Type::record, std::vector<uint8_t>(sizeof(T))};
  std::memcpy(o.bytes.data(), &value, sizeof(T));
  return o;
}
// Filled with NaN, or 0xdeadbeef.
Operand out_floats(size_t n, Role role = Role::out);
Operand out_acts(size_t n, Role role = Role::out);
Operand out_words(size_t n);
Operand live_rows(uint32_t rows, uint32_t position = 0);  // a step record

struct Case {
  std::string kernel, label;
  std::vector<uint8_t> args;
  std::vector<Operand> buffers;
  uint32_t groups = 0;
};
template <class Args>
Case make_case(const std::string& kernel, const std::string& label, const Args& args, std::vector<Operand> buffers, uint64_t groups) {
  Case c{kernel, label, std::vector<uint8_t>(sizeof(Args)), std::move(buffers), uint32_t(groups)};
  std::memcpy(c.args.data(), &args, sizeof(Args));
  return c;
}

enum class Placement { heap, page_end };
// Each buffer after the run, act as float32. split: threadgroups of a range, the last range first; 0: all at once.
std::vector<std::vector<uint8_t>> run_case(const Case& c, const std::string& isa, DType storage, Placement placement, uint32_t split);

// A weight in some format, with random codes; stacks have `experts` matrices, `stride` rows apart.
struct TestWeight {
  LilyFormat format;
  std::vector<uint8_t> codes, scales, biases;
  void push(std::vector<Operand>& buffers) const;
};
LilyFormat format_of(const std::string& name);  // "4g64", "bf16", ...

struct Random {
  uint64_t state;
  explicit Random(uint64_t seed) : state(seed * 0x9e3779b97f4a7c15ull + 1) {}
  uint64_t next();
  uint32_t below(uint32_t n) { return uint32_t(next() % n); }
  float normal(float scale = 1);
  Floats normals(size_t n, float scale = 1);
  TestWeight weight(const LilyFormat& format, uint64_t rows, uint32_t K);
};

inline uint32_t groups_of(uint64_t n, uint64_t size) { return uint32_t((n + size - 1) / size); }
// The partial sums of squares that decode's producers leave.
Floats partial_squares(const Floats& h);

// The cases, by kernel family.
std::vector<Case> linear_cases();
std::vector<Case> expert_cases();
std::vector<Case> row_cases();  // embedding, norms, Gated DeltaNet
std::vector<Case> attention_cases();
std::vector<Case> sampling_cases();

}  // namespace lily::test
