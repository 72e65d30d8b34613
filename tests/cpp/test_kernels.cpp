// Every kernel of the CPU on every instruction set and both storages: no access outside its buffers, the same bits however its threadgroups
// are cut into ranges and on avx2 and avx512, and portable code within the error of fp32 sums.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
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

// Decode in fixed point: x that is tiny or huge, whose groups span many powers of two or are all zero. The error is that of half a unit for each value, 2^-22 of its group's
// largest, and of the fp32 sums after it.
LILY_TEST(kernels_5_in_fixed_point) {
  constexpr uint32_t K = 320, N = 17;
  Random r(9);
  for (int turn = 0; turn < 18; turn++) {
    const TestWeight w = r.weight(format_of("4g64"), N, K);
    Floats x = r.normals(K);
    const int magnitude[] = {0, -60, 60, -104, 100, -7}, spread = turn < 6 ? 1 : 4 * (turn - 5);
    for (uint32_t k = 0; k < K; k++) x[k] = (turn + k / 64) % 6 == 5 ? 0.0f : std::ldexp(x[k], magnitude[turn % 6] - int(r.below(uint32_t(spread))));
    LilyGemvArgs a{w.format, K, 1, 0, {{N, 0, 0}}};
    std::vector<Operand> buffers{acts(x), out_floats(N)};
    w.push(buffers);
    const Case c = make_case("gemv", "wide", a, buffers, groups_of(N, 16));
    Results first;
    for (const std::string& isa : cpu_instruction_sets()) {
      const Results result = run_case(c, isa, DType::bf16, Placement::heap, 0);
      if (first.empty()) first = result;
      if (isa != "portable") same_bits(c, result, first, "gemv in fixed point on " + isa);
      const float *stored = reinterpret_cast<const float*>(result[0].data()), *y = reinterpret_cast<const float*>(result[1].data());
      auto bf16 = [](const std::vector<uint8_t>& v, uint32_t i) {
        uint32_t u = uint32_t(v[2 * i] | v[2 * i + 1] << 8) << 16;
        float f;
        std::memcpy(&f, &u, 4);
        return double(f);
      };
      for (uint32_t n = 0; n < N; n++) {
        double exact = 0, allowed = 0;
        for (uint32_t g = 0; g < K / 64; g++) {
          double most = 0, codes = 0;
          const double scale = bf16(w.scales, n * (K / 64) + g), bias = bf16(w.biases, n * (K / 64) + g);
          for (uint32_t k = 64 * g; k < 64 * g + 64; k++) {
            const uint32_t at = n * K + k, q = w.codes[at / 2] >> (at % 2 * 4) & 15;
            exact += (scale * q + bias) * stored[k];
            allowed += std::ldexp(std::abs(scale * q * stored[k]) + std::abs(bias * stored[k]), -20);
            most = std::max(most, std::abs(double(stored[k])));
            codes += q;
          }
          if (most > 0) allowed += std::abs(scale) * codes * std::max(std::ldexp(most, -22), std::ldexp(1.0, -122));
        }
        if (!(std::abs(y[n] - exact) <= allowed)) fail(__FILE__, __LINE__, isa + ", row " + std::to_string(n) + ": " + std::to_string(y[n]) + " for " + std::to_string(exact));
      }
    }
  }
  // What is not finite stays so.
  for (float odd : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    const TestWeight w = r.weight(format_of("4g64"), N, K);
    Floats x = r.normals(K);
    x[77] = odd;
    LilyGemvArgs a{w.format, K, 1, 0, {{N, 0, 0}}};
    std::vector<Operand> buffers{acts(x), out_floats(N)};
    w.push(buffers);
    for (const std::string& isa : cpu_instruction_sets()) {
      const auto result = run_case(make_case("gemv", "not finite", a, buffers, groups_of(N, 16)), isa, DType::bf16, Placement::heap, 0);
      for (uint32_t n = 0; n < N; n++) CHECK(!std::isfinite(reinterpret_cast<const float*>(result[1].data())[n]));
    }
  }
}

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
