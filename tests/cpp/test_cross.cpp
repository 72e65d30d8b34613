// What cross.sh compares between processors: on every instruction set the fixtures' logits to their bars, and one line for each kernel case
// and each model with a hash of the results of the best instruction set. Fused ones must agree in every bit, wherever they run.
#include <cmath>
#include <cstdio>
#include <fstream>

#include "check.hpp"
#include "fixture.hpp"
#include "kernel_case.hpp"

namespace lily::test {
namespace {

struct Hash {  // FNV-1a
  uint64_t value = 0xcbf29ce484222325ull;
  void add(const void* data, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) value = (value ^ static_cast<const uint8_t*>(data)[i]) * 0x100000001b3ull;
  }
};

// DATA_DIR/<what>_<instruction set>.txt
class Digests {
 public:
  Digests(const std::string& what, const std::string& isa) : file_(data_directory() + "/" + what + "_" + isa + ".txt") {}
  void write(const std::string& label, DType storage, const Hash& hash) {
    char line[32];
    std::snprintf(line, sizeof(line), "%016llx", static_cast<unsigned long long>(hash.value));
    file_ << line << (storage == DType::f32 ? " float32 " : " bfloat16 ") << label << std::endl;
    CHECK(file_.good());
  }

 private:
  std::ofstream file_;
};

LILY_TEST(cross_kernel_digests) {
  const std::string isa = cpu_instruction_sets().front();
  Digests digests("kernels", isa);
  for (const auto& cases : {linear_cases(), expert_cases(), row_cases(), attention_cases(), sampling_cases()})
    for (const Case& c : cases)
      for (DType storage : {DType::bf16, DType::f32}) {
        const auto results = run_case(c, isa, storage, Placement::heap, 0);
        Hash hash;
        for (size_t i = 0; i < results.size(); i++)
          if (c.buffers[i].role == Role::out || c.buffers[i].role == Role::inout) hash.add(results[i].data(), results[i].size());
        digests.write(c.kernel + " " + c.label, storage, hash);
      }
}

// Relative RMS of rows of logits against the reference; the largest difference in `worst`.
double error_of(const float* found, const std::vector<float>& wanted, double& worst) {
  double error = 0, norm = 0;
  worst = 0;
  for (size_t i = 0; i < wanted.size(); i++) {
    const double d = double(found[i]) - wanted[i];
    worst = std::max(worst, std::abs(d));
    error += d * d;
    norm += double(wanted[i]) * wanted[i];
  }
  return std::sqrt(error / norm);
}

// The prompt of 64 tokens: all of its logits, then four tokens decoded.
Hash run_fixture(const Fixture& f, const char* device, const std::string& isa) {
  auto engine = f.open(device);
  const bool exact = engine->device()->storage() == DType::f32;
  const Prompt& prompt = f.prompts.at(64);
  auto session = std::make_shared<Session>(engine);
  std::vector<float> all(64 * f.spec.vocab_size);
  session->append_rows(prompt.ids.data(), 64, Session::Rows::logits, all.data(), nullptr, nullptr);
  double worst;
  const double error = error_of(all.data() + (64 - prompt.rows) * f.spec.vocab_size, prompt.logits, worst);
  std::printf("       %s, %s, %s: relative error %.5f\n", f.name.c_str(), device, isa.c_str(), error);
  CHECK(exact ? worst < 1e-3 : error < (f.spec.moe() ? 0.07 : 0.04));  // the bars of tests/test_fixtures.py
  const Ids tokens = generate(session, 4);
  if (exact) CHECK(tokens == part(prompt.greedy, 0, 4));
  Hash hash;
  hash.add(all.data(), all.size() * sizeof(float));
  const auto last = logits(*session);
  hash.add(last.data(), last.size() * sizeof(float));
  return hash;
}

LILY_TEST(cross_logits_on_every_instruction_set) {
  for (const std::string& isa : cpu_instruction_sets()) {
    Environment forced("LILY_KERNEL", ("*=" + isa).c_str());
    Digests digests("logits", isa);
    const bool best = isa == cpu_instruction_sets().front();
    for (auto [name, device] : {std::pair{kMoe, "cpu"}, {kDense, "cpu:float32"}, {kMoe, "cpu:float32"}, {kDense, "cpu"}}) {
      if (!best && (name == kMoe) != (device == std::string("cpu"))) continue;  // each model and each storage once: emulated, it is slow
      digests.write(name, device == std::string("cpu") ? DType::bf16 : DType::f32, run_fixture(fixture(name), device, isa));
    }
  }
}

}  // namespace
}  // namespace lily::test
