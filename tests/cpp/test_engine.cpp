// What the engine computes: the reference's logits, and the same bits however a prompt is cut, forked, scheduled or continued.
#include <cmath>

#include "check.hpp"
#include "fixture.hpp"

namespace lily::test {
namespace {

const char* const kNames[] = {kMoe, kDense};
const char* const kDevices[] = {"cpu:float32", "cpu"};

LILY_TEST(engine_logits_are_the_reference) {
  for (const char* name : kNames)
    for (const char* device : kDevices) {
      const Fixture& f = fixture(name);
      auto engine = f.open(device);
      const size_t V = f.spec.vocab_size;
      for (auto& [length, prompt] : f.prompts) {
        if (length > (engine->device()->storage() != DType::f32 ? 7u : f.spec.moe() ? 64u : 300u)) continue;  // what takes long adds little
        Session session(engine);
        std::vector<float> all(length * V);
        session.append_rows(prompt.ids.data(), length, Session::Rows::logits, all.data(), nullptr, nullptr);
        const float* last = all.data() + (length - prompt.rows) * V;
        double worst = 0, error = 0, norm = 0;
        for (size_t i = 0; i < prompt.logits.size(); i++) {
          const double d = double(last[i]) - prompt.logits[i];
          worst = std::max(worst, std::abs(d));
          error += d * d;
          norm += double(prompt.logits[i]) * prompt.logits[i];
        }
        if (engine->device()->storage() == DType::f32)
          CHECK(worst < 1e-3);
        else
          CHECK(std::sqrt(error / norm) < 0.05);  // every product takes bfloat16 inputs; measured: at most 0.032
        CHECK(logits(session) == std::vector<float>(all.end() - long(V), all.end()));
      }
    }
}

LILY_TEST(engine_score_is_the_logits_softmax) {
  const Fixture& f = fixture(kMoe);
  auto engine = f.open("cpu:float32");
  const Prompt& prompt = f.prompts.at(64);
  Session session(engine);
  std::vector<float> scores(64);
  session.append_rows(prompt.ids.data(), 64, Session::Rows::score, scores.data(), nullptr, nullptr);
  for (size_t t = 0; t + 1 < 64; t++) {
    const float* row = prompt.logits.data() + t * f.spec.vocab_size;
    double sum = 0;
    for (uint32_t i = 0; i < f.spec.vocab_size; i++) sum += std::exp(double(row[i]));
    CHECK(std::abs(row[prompt.ids[t + 1]] - std::log(sum) - scores[t]) < 1e-3);
  }
  CHECK_EQUAL(scores[63], 0.0f);
}

LILY_TEST(engine_split_prompts_are_equal_in_every_bit) {
  for (auto [name, device] : {std::pair{kMoe, "cpu"}, std::pair{kDense, "cpu:float32"}}) {
    const Fixture& f = fixture(name);
    auto engine = f.open(device);
    const Ids ids = part(f.prompts.at(300).ids, 0, 70);
    Session whole(engine);
    append(whole, ids);
    const auto expected = logits(whole);
    for (const std::vector<size_t>& cuts : {std::vector<size_t>{1, 16, 33, 70}, {63, 64, 65, 70}}) {
      Session session(engine);
      size_t begin = 0;
      for (size_t cut : cuts) {
        append(session, part(ids, begin, cut));
        begin = cut;
      }
      CHECK(logits(session) == expected);
    }
    for (uint32_t chunk : {7u}) {
      engine->set_chunk(chunk);
      Session session(engine);
      append(session, ids);
      CHECK(logits(session) == expected);
      CHECK(session.tokens() == ids && session.consumed() == ids.size());
    }
    CHECK_THROWS(InvalidArgument, engine->set_chunk(0));
  }
}

LILY_TEST(engine_schedules_are_equal_in_every_bit) {
  const Fixture& f = fixture(kMoe);
  for (const char* plan : {"fused", "unfused"}) {
    Environment forced("LILY_PLAN", plan);
    auto engine = f.open("cpu");
    std::vector<float> expected;
    Ids tokens;
    for (const char* schedule : {"stages", "serial", "shuffle:1", "shuffle:2"}) {
      engine->set_schedule(Schedule::parse(schedule));
      auto session = std::make_shared<Session>(engine);
      append(*session, f.prompts.at(7).ids);
      const Ids found = generate(session, 4);
      const auto found_logits = logits(*session);
      if (expected.empty()) expected = found_logits, tokens = found;
      CHECK(found_logits == expected && found == tokens);
    }
  }
}

LILY_TEST(engine_decodes_the_reference_greedily) {
  for (const char* name : kNames) {
    const Fixture& f = fixture(name);
    auto engine = f.open("cpu:float32");
    for (auto& [length, prompt] : f.prompts) {
      if (length != 7 && length != 64) continue;
      auto session = std::make_shared<Session>(engine);
      append(*session, prompt.ids);
      Decoder decoder(session, {}, prompt.greedy.size());
      for (int32_t expected : prompt.greedy) {
        auto token = decoder.next(nullptr, 0, nullptr);
        CHECK(token && token->token == expected);
        CHECK(engine->device()->in_flight() <= 2);  // forward and sampler of the step ahead, no more
      }
      CHECK(!decoder.next(nullptr, 0, nullptr));
      CHECK(decoder.limit() == Decoder::Limit::max_tokens);
      CHECK(session->tokens() == joined(prompt.ids, prompt.greedy) && session->pending());
    }
  }
}

LILY_TEST(engine_samples_with_every_setting) {
  const Fixture& f = fixture(kDense);
  auto engine = f.open("cpu");
  SamplingParams params;
  params.temperature = 0.8f;
  params.top_k = 40;
  params.top_p = 0.9f;
  params.min_p = 0.02f;
  params.repetition_penalty = 1.1f;
  params.presence_penalty = 0.2f;
  params.frequency_penalty = 0.1f;
  params.logit_bias = {{3, 5.0f}, {511, -100.0f}};
  params.logprobs = 20;
  params.masked = true;
  params.seed = 11;
  std::vector<uint32_t> mask(f.spec.vocab_size / 32, 0x55555555u);
  Ids first;
  for (int round = 0; round < 2; round++) {
    auto session = std::make_shared<Session>(engine);
    append(*session, f.prompts.at(7).ids);
    Decoder decoder(session, params, 9);
    Ids ids;
    while (auto token = decoder.next(mask.data(), mask.size(), nullptr)) {
      CHECK(token->token % 2 == 0 && token->top_ids.size() == 20 && token->top_logprobs[0] >= token->logprob);
      ids.push_back(token->token);
    }
    CHECK_EQUAL(ids.size(), 9u);
    if (round == 0) first = ids;
    CHECK(ids == first);
  }
  auto session = std::make_shared<Session>(engine);
  append(*session, f.prompts.at(7).ids);
  Decoder decoder(session, params, 9);
  CHECK_THROWS(InvalidArgument, decoder.next(mask.data(), mask.size() - 1, nullptr));
  decoder.close();
  params.logit_bias = {{512, 1.0f}};
  CHECK_THROWS(SamplingError, Decoder(session, params, 9));
  CHECK(!session->busy());
}

LILY_TEST(engine_traces_the_unfused_plan) {
  const Fixture& f = fixture(kMoe);
  auto engine = f.open("cpu:float32");
  Session session(engine);
  uint32_t seen = 0;
  session.trace(f.prompts.at(7).ids.data(), 7, [&](const TraceTag& tag, const uint8_t* data, uint64_t bytes) {
    CHECK(!tag.name.empty() && data && bytes > 0);
    seen++;
  });
  CHECK(seen > 40);
  CHECK(session.tokens().empty() && session.consumed() == 0);
}

}  // namespace
}  // namespace lily::test
