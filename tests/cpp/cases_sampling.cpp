// The sampler's three kernels on each other's outputs, and the score: vocabularies that no vector divides, one and several blocks.
#include <limits>

#include "kernel_case.hpp"

namespace lily::test {
namespace {

struct Settings {
  const char* name;
  uint32_t flags;
  float temperature;
  uint32_t top_k;
  float top_p, min_p;
  uint32_t n_logprobs;
};

const Settings kSettings[] = {
    {"greedy", LILY_SAMPLE_GREEDY, 0, 0, 1, 0, 0},
    {"plain", 0, 1, 0, 1, 0, 0},
    {"top-k", LILY_SAMPLE_LOGPROBS, 0.7f, 20, 0.95f, 0.05f, 20},
    {"top-p", LILY_SAMPLE_MASK, 1.3f, 0, 0.8f, 0, 0},
    {"everything", LILY_SAMPLE_PENALTY | LILY_SAMPLE_BIAS | LILY_SAMPLE_MASK | LILY_SAMPLE_LOGPROBS, 0.9f, 5, 0.9f, 0.1f, 3},
    {"more than there is", LILY_SAMPLE_LOGPROBS, 1, 1u << 20, 1, 0, 100},
};

void add_sampler(std::vector<Case>& cases, Random& r, uint32_t V, const Settings& x, bool none) {
  const std::string label = std::string(x.name) + " of " + std::to_string(V) + (none ? ", nothing allowed" : "");
  const uint32_t blocks = groups_of(V, LILY_SAMPLE_BLOCK);
  const size_t bins = size_t(blocks) * LILY_HIST_BINS;
  LilySampleArgs a{V, blocks};
  LilySample s{};
  s.flags = x.flags;
  s.temperature = x.temperature;
  s.top_k = x.top_k;
  s.top_p = x.top_p;
  s.min_p = x.min_p;
  s.repetition_penalty = 1.2f;
  s.presence_penalty = 0.3f;
  s.frequency_penalty = 0.1f;
  s.seed_lo = 7;
  s.position = 41;
  s.n_logprobs = x.n_logprobs;
  Floats logits = r.normals(V, 3), bias(V);
  Words counts(V), mask(groups_of(V, 32));
  for (uint32_t i = 0; i < V; i++) {
    if (r.below(20) == 0) logits[i] = -std::numeric_limits<float>::infinity();
    if (r.below(4) == 0) counts[i] = 0x80000000u | r.below(3);
    if (r.below(4) == 0) bias[i] = r.normal();
  }
  if (V > 20) logits[3] = std::numeric_limits<float>::quiet_NaN();
  for (uint32_t& m : mask) m = none ? 0 : uint32_t(r.next());
  // A buffer that the flags do not name is absent.
  auto given = [&](uint32_t flag, const Operand& o) { return x.flags & flag ? o : absent(); };
  const bool histogram = x.top_k || (x.flags & LILY_SAMPLE_LOGPROBS);
  Operand maxima_out = out_floats(size_t(blocks) * 4);
  maxima_out.type = Type::record;  // max, its id, sum
  Case adjust = make_case("sample_adjust", label, a,
                          {record(s), floats(logits), given(LILY_SAMPLE_PENALTY, words(counts)), given(LILY_SAMPLE_BIAS, floats(bias)), given(LILY_SAMPLE_MASK, words(mask)), out_floats(V),
                           maxima_out, histogram ? out_words(bins) : absent()},
                          blocks);
  cases.push_back(adjust);

  auto made = run_case(adjust, "portable", DType::f32, Placement::heap, 0);
  auto as = [](Type type, const std::vector<uint8_t>& bytes) { return Operand{Role::in, type, bytes}; };
  const Operand y = as(Type::f32, made[5]), maxima = as(Type::f32, made[6]);
  const bool mass = !(x.flags & LILY_SAMPLE_GREEDY) && x.top_p < 1 && !x.top_k;
  Case weigh = make_case("sample_mass", label, a, {record(s), y, maxima, mass ? out_floats(bins) : absent()}, blocks);
  cases.push_back(weigh);
  made.push_back(run_case(weigh, "portable", DType::f32, Placement::heap, 0)[3]);

  cases.push_back(make_case("sample_draw", label, a,
                            {record(s, Role::inout), y, maxima, histogram ? as(Type::u32, made[7]) : absent(), mass ? as(Type::f32, made[8]) : absent(), out_floats(size_t(V) * 2, Role::scratch),
                             given(LILY_SAMPLE_PENALTY, words(counts, Role::inout)), record(LilyStep{}, Role::inout)},
                            1));
}

}  // namespace

std::vector<Case> sampling_cases() {
  std::vector<Case> cases;
  Random r(5);
  for (uint32_t V : {2u, 17u, 512u, LILY_SAMPLE_BLOCK + 5u})
    for (const Settings& x : kSettings) {
      add_sampler(cases, r, V, x, false);
      if (x.flags & LILY_SAMPLE_MASK) add_sampler(cases, r, V, x, true);
    }
  for (uint32_t V : {2u, 17u, 300u, 1000u}) {
    Words targets{0, V - 1, 0xffffffffu};  // the last row has no next token
    cases.push_back(make_case("score_rows", std::to_string(V), LilySampleArgs{V, 0}, {live_rows(3), floats(r.normals(size_t(3) * V, 3)), words(targets), out_floats(3)}, 64));
  }
  return cases;
}

}  // namespace lily::test
