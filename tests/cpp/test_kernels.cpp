// Every kernel of the CPU on every instruction set and both storages: no access outside its buffers, the same bits however its threadgroups
// are cut into ranges and on avx2 and avx512, and portable code within the error of fp32 sums.
#include <cmath>
#include <cstring>
#include <set>

#include "base/error.hpp"
#include "check.hpp"
#include "kernel_case.hpp"

namespace lily::test {
namespace {

using Results = std::vector<std::vector<uint8_t>>;

// Relative RMS between instruction sets without fused multiply-adds and with. A value that is rounded to bfloat16 may fall the other way.
constexpr double kFloat32Tolerance = 1e-4, kBfloat16Tolerance = 2e-3;

void same_bits(const Case& c, const Results& a, const Results& b, const std::string& what) {
  for (size_t i = 0; i < a.size(); i++)
    if (c.buffers[i].role != Role::scratch && a[i] != b[i]) fail(__FILE__, __LINE__, c.label + ": buffer " + std::to_string(i) + " differs: " + what);
}

void close(const Case& c, const Results& a, const Results& b, double tolerance, const std::string& what) {
  for (size_t i = 0; i < a.size(); i++) {
    const Operand& o = c.buffers[i];
    if (o.role != Role::out && o.role != Role::inout) continue;
    double error = 0, norm = 0;
    for (size_t at = 0; at < a[i].size(); at += 4) {
      uint32_t x, y;
      std::memcpy(&x, &a[i][at], 4);
      std::memcpy(&y, &b[i][at], 4);
      float u = 0, v = 0;
      std::memcpy(&u, &x, 4);
      std::memcpy(&v, &y, 4);
      if (o.type == Type::u32 || (o.type == Type::record && std::abs(u) < 1e-30f)) {  // an integer
        if (x != y) fail(__FILE__, __LINE__, c.label + ": buffer " + std::to_string(i) + " differs at " + std::to_string(at / 4) + ": " + what);
      } else if (x != y) {
        error += (double(u) - v) * (double(u) - v);
      }
      if (std::isfinite(v)) norm += double(v) * v;
    }
    if (!(std::sqrt(error) <= tolerance * std::sqrt(norm)))
      fail(__FILE__, __LINE__, c.label + ": buffer " + std::to_string(i) + ": relative error " + std::to_string(std::sqrt(error / norm)) + ": " + what);
  }
}

void run_everywhere(const Case& c, std::set<std::string>& seen) {
  seen.insert(c.kernel);
  for (DType storage : {DType::bf16, DType::f32}) {
    Results first;
    std::string first_isa;
    for (const std::string& isa : cpu_instruction_sets()) {
      const std::string name = c.kernel + " on " + isa + (storage == DType::f32 ? " float32" : " bfloat16");
      Results whole = run_case(c, isa, storage, Placement::heap, 0);
      same_bits(c, whole, run_case(c, isa, storage, Placement::page_end, c.groups > 40 ? 7 : 1), name + ", in ranges");
      for (size_t i = 0; i < c.buffers.size(); i++)
        if (c.buffers[i].role == Role::in) {
          Operand untouched = c.buffers[i];
          if (untouched.type == Type::packed || storage == DType::f32) CHECK(whole[i] == untouched.bytes);
        }
      if (first.empty()) {
        first = std::move(whole);
        first_isa = isa;
      } else if (isa == "portable") {
        close(c, whole, first, storage == DType::f32 ? kFloat32Tolerance : kBfloat16Tolerance, name + " and " + first_isa);
      } else {
        same_bits(c, whole, first, name + " and " + first_isa);
      }
    }
  }
}

std::set<std::string>& kernels_seen() {
  static std::set<std::string> seen;
  return seen;
}

void run_all(const std::vector<Case>& cases) {
  CHECK(!cases.empty());
  for (const Case& c : cases) run_everywhere(c, kernels_seen());
}

LILY_TEST(kernels_1_linear) { run_all(linear_cases()); }
LILY_TEST(kernels_2_experts) { run_all(expert_cases()); }
LILY_TEST(kernels_3_rows) { run_all(row_cases()); }
LILY_TEST(kernels_4_attention) { run_all(attention_cases()); }
LILY_TEST(kernels_5_sampling) { run_all(sampling_cases()); }

// After the families, in the order of this file.
LILY_TEST(kernels_6_all_covered) {
  std::string missing;
  for (const std::string& name : cpu_kernel_names())
    if (!kernels_seen().count(name)) missing += " " + name;
  CHECK_EQUAL(missing, std::string());
  CHECK_THROWS(InvalidArgument, find_cpu_kernel("no_such_kernel", "portable", DType::f32));
  CHECK_THROWS(InvalidArgument, find_cpu_kernel("gemv", "no_such_set", DType::f32));
}

}  // namespace
}  // namespace lily::test
