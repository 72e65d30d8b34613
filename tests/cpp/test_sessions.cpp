// What survives: failures, interrupts, dropped decoders, forks, limits, sessions side by side, and closing in any order.
#include <atomic>
#include <cstdio>
#include <cstring>
#include <thread>

#include "check.hpp"
#include "fixture.hpp"

namespace lily::test {
namespace {

std::shared_ptr<Session> session_on(const std::shared_ptr<Engine>& engine, const Ids& ids) {
  auto session = std::make_shared<Session>(engine);
  append(*session, ids);
  return session;
}

const Ids& prompt(uint32_t length, const char* name = kMoe) { return fixture(name).prompts.at(length).ids; }

LILY_TEST(sessions_survive_failed_steps) {
  auto engine = fixture(kMoe).open("cpu");
  const Ids expected = generate(session_on(engine, prompt(7)), 6);
  for (int step : {0, 1, 2, 5})
    for (int stage : {0, 7}) {
      auto session = session_on(engine, prompt(7));
      Decoder decoder(session, {}, 6);
      engine->device()->fail_at(step, stage);
      Ids found;
      bool failed = false;
      try {
        while (auto token = decoder.next(nullptr, 0, nullptr)) found.push_back(token->token);
      } catch (const GPUError& e) {
        failed = true;
        CHECK(e.stage == stage || e.stage == -1);
      }
      engine->device()->fail_at(-1, 0);
      CHECK(failed || found == expected);  // a short program has no such stage
      if (failed) CHECK_THROWS(InvalidArgument, decoder.next(nullptr, 0, nullptr));
      CHECK(found == part(expected, 0, found.size()));
      CHECK(session->tokens() == joined(prompt(7), found));
      decoder.close();
      CHECK(!session->busy() && engine->device()->in_flight() == 0);
      CHECK(joined(found, generate(session, 6 - found.size())) == expected);
    }
}

LILY_TEST(sessions_keep_whole_chunks_of_a_failed_prompt) {
  auto engine = fixture(kDense).open("cpu");
  engine->set_chunk(16);
  const Ids ids = part(prompt(300, kDense), 0, 40);
  auto whole = session_on(engine, ids);
  const auto expected = logits(*whole);
  for (int chunk : {0, 1, 2})
    for (int stage : {0, 20}) {
      Session session(engine);
      engine->device()->fail_at(chunk, stage);
      CHECK_THROWS(GPUError, append(session, ids));
      CHECK_EQUAL(session.consumed(), uint32_t(chunk) * 16);
      CHECK(session.tokens() == part(ids, 0, size_t(chunk) * 16));
      append(session, part(ids, session.consumed(), ids.size()));
      CHECK(logits(session) == expected);
    }
  CHECK_THROWS(InvalidArgument, append(*whole, {}));
  CHECK_THROWS(InvalidArgument, append(*whole, {512}));
  CHECK_THROWS(InvalidArgument, append(*whole, {-1}));
  CHECK(logits(*whole) == expected);
}

LILY_TEST(sessions_survive_interrupts_from_another_thread) {
  auto engine = fixture(kDense).open("cpu");
  const Ids ids = part(prompt(300, kDense), 0, 120);
  const auto expected = logits(*session_on(engine, ids));
  int interrupted = 0;
  for (int i = 0; i < 2; i++) {
    engine->set_chunk(i % 2 ? 60 : 120);
    Session session(engine);
    std::atomic<bool> stop{false};
    std::thread other([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(i * 20));
      stop = true;
    });
    try {
      session.append(ids.data(), ids.size(), nullptr, [&] { return stop.load(); });
    } catch (const Interrupted&) {
      interrupted++;
    }
    other.join();
    CHECK(session.consumed() % engine->chunk() == 0 && !session.busy());
    CHECK(session.tokens() == part(ids, 0, session.consumed()));
    if (session.consumed() < ids.size()) append(session, part(ids, session.consumed(), ids.size()));
    CHECK(logits(session) == expected);
  }
  std::printf("       %d of 2 prompts were interrupted\n", interrupted);
}

// A device's own cancellation, without the engine's polling: the flag is seen between two stages.
LILY_TEST(device_cancels_and_skips) {
  auto device = open_device("cpu");
  BufferPtr step = device->allocate(sizeof(LilyStep)), h = device->allocate(1 << 16), y = device->allocate(1 << 16);
  LilyStep record{};
  record.rows = 1;
  std::memcpy(step->host(), &record, sizeof(record));
  std::memset(h->host(), 0, 1 << 16);
  std::memset(y->host(), 0, 1 << 16);
  Program program(0);
  const LilyNormArgs args{1 << 14, 0, 0};
  for (int i = 0; i < 20000; i++)
    program.record(make_dispatch("residual_rows", "r", args, {{0, 0, sizeof(LilyStep), Access::read}, {1, 0, 1 << 16, Access::read}, {2, 0, 1 << 16, Access::read_write}}, 1));
  PreparedPtr prepared = device->prepare(program.dispatches(), program.order(Schedule::parse("serial")));
  auto cancel = std::make_shared<std::atomic<bool>>(false);
  auto submit = [&](const TicketPtr& after) {
    Submission s;
    s.program = prepared;
    s.bindings = {std::make_shared<Bindings>(), Bindings{{step, 0}, {y, 0}, {h, 0}}};
    s.after = after;
    s.cancel = cancel;
    return device->submit(std::move(s));
  };
  TicketPtr first = submit(nullptr), second = submit(first);
  std::thread other([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    cancel->store(true);
  });
  while (!second->wait_for(std::chrono::milliseconds(100))) {
  }
  other.join();
  CHECK(first->status() == Ticket::Status::cancelled && second->status() == Ticket::Status::skipped);
  CHECK_THROWS(CancelledError, first->check());
  CHECK_THROWS(GPUError, second->check());
  CHECK_EQUAL(device->counters().submissions, 0u);
  CHECK_THROWS(DeviceError, open_device("cpu:float64"));
}

LILY_TEST(sessions_outlive_dropped_decoders) {
  auto engine = fixture(kMoe).open("cpu");
  const Ids expected = generate(session_on(engine, prompt(64)), 12);
  auto session = session_on(engine, prompt(64));
  const uint64_t requests = engine->memory().requests;
  Ids found;
  for (int taken : {0, 1, 2, 3, 1, 0, 5}) {
    auto decoder = std::make_unique<Decoder>(session, SamplingParams{}, 100);
    CHECK(session->busy());
    CHECK_THROWS(InvalidArgument, append(*session, {1}));
    CHECK_THROWS(InvalidArgument, session->fork());
    CHECK_THROWS(InvalidArgument, Decoder(session, {}, 1));
    for (int i = 0; i < taken; i++) found.push_back(decoder->next(nullptr, 0, nullptr)->token);
    decoder.reset();
    CHECK(!session->busy() && engine->device()->in_flight() == 0);
    CHECK(engine->memory().requests < requests + 4096);  // the block table at most
  }
  CHECK(found == expected);
}

// Across the border of a K/V block, which is copied when two forks write to it.
LILY_TEST(forks_go_their_own_ways) {
  auto engine = fixture(kDense).open("cpu");
  const Ids past = part(prompt(300, kDense), 0, 250), a = part(prompt(300, kDense), 250, 260);
  Ids b = a;
  for (int32_t& id : b) id = (id + 100) % 512;
  const Ids expected_a = generate(session_on(engine, joined(past, a)), 2), expected_b = generate(session_on(engine, joined(past, b)), 2);
  auto base = session_on(engine, past);
  auto check = [&](std::shared_ptr<Session> first, std::shared_ptr<Session> second) {
    append(*first, a);
    append(*second, b);
    auto third = first->fork();
    CHECK(generate(first, 2) == expected_a);
    first.reset();
    CHECK(generate(second, 2) == expected_b);
    CHECK(generate(third, 2) == expected_a);
  };
  check(base->fork(), base->fork());

  // Blocks reserved ahead of the consumed tokens, by a failed chunk or by the step ahead, belong to nobody's past: a fork must not share them.
  engine->device()->fail_at(0, 3);
  CHECK_THROWS(GPUError, append(*base, a));
  CHECK_EQUAL(base->consumed(), 250u);
  CHECK_EQUAL(base->kv_blocks().size(), 2u);
  auto fork = base->fork();
  check(base, fork);
}

LILY_TEST(limits_of_the_context) {
  Fixture f = fixture(kDense);
  f.spec.max_context = 70;
  auto engine = f.open("cpu");
  auto session = session_on(engine, prompt(64, kDense));
  CHECK_THROWS(ContextOverflowError, append(*session, prompt(7, kDense)));
  Decoder decoder(session, {}, 100);
  Ids found;
  while (auto token = decoder.next(nullptr, 0, nullptr)) found.push_back(token->token);
  CHECK_EQUAL(found.size(), 6u);
  CHECK(decoder.limit() == Decoder::Limit::context);
  decoder.close();
  CHECK(generate(session, 5).empty());
  CHECK_THROWS(ContextOverflowError, append(*session, {1}));
  Session empty(engine);
  CHECK_THROWS(InvalidArgument, logits(empty));
  CHECK_THROWS(InvalidArgument, Decoder(std::make_shared<Session>(engine), {}, 1));
}

LILY_TEST(limits_of_the_memory) {
  const Fixture& f = fixture(kMoe);
  CHECK_THROWS(OutOfMemoryError, f.open("cpu", 1 << 20));
  uint64_t least = 0;
  try {
    f.open("cpu", 1 << 20);
  } catch (const OutOfMemoryError& e) {
    least = e.needed;
  }
  auto engine = f.open("cpu", least);
  auto session = std::make_shared<Session>(engine);
  append(*session, prompt(300));  // in chunks that fit; the arenas' empty half goes to the states
  Ids longer;
  for (int i = 0; i < 8; i++) longer.insert(longer.end(), prompt(300).begin(), prompt(300).end());
  CHECK_THROWS(OutOfMemoryError, append(*session, longer));
  CHECK(session->tokens().size() >= 300 && session->tokens().size() < longer.size() && !session->busy());
  engine = f.open("cpu", least + (6 << 20));
  session = session_on(engine, prompt(64));
  const Ids expected = generate(session, 3);
  std::vector<std::shared_ptr<Session>> more;
  CHECK_THROWS(OutOfMemoryError, for (int i = 0; i < 200; i++) more.push_back(session_on(engine, prompt(7))));
  CHECK(!more.empty());
  const MemoryReport full = engine->memory();
  CHECK(full.weights + full.kv + full.states + full.workspace + full.requests <= full.limit);
  more.clear();
  CHECK(generate(session_on(engine, prompt(64)), 3) == expected);
  CHECK(engine->memory().requests < full.requests);
}

LILY_TEST(sessions_side_by_side) {
  const Ids prompts[] = {prompt(64), part(prompt(300), 200, 230), prompt(7)};
  std::vector<Ids> expected(3), found(3);
  auto engine = fixture(kMoe).open("cpu");
  for (int i = 0; i < 3; i++) expected[i] = generate(session_on(engine, prompts[i]), 8);
  engine = fixture(kMoe).open("cpu");  // its arenas grow while the others work
  engine->set_chunk(16);
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; i++)
    threads.emplace_back([&, i] {
      auto session = session_on(engine, prompts[i]);
      auto fork = session->fork();
      found[i] = generate(session, 8);
      if (generate(fork, 8) != found[i]) found[i].clear();
    });
  for (auto& t : threads) t.join();
  for (int i = 0; i < 3; i++) CHECK(found[i] == expected[i]);
}

LILY_TEST(closing_in_any_order) {
  const Ids expected = generate(session_on(fixture(kMoe).open("cpu"), prompt(7)), 4);
  {  // the model first, then the session, then the decoder
    auto engine = fixture(kMoe).open("cpu");
    auto session = session_on(engine, prompt(7));
    auto decoder = std::make_unique<Decoder>(session, SamplingParams{}, 4);
    engine.reset();
    Ids found{decoder->next(nullptr, 0, nullptr)->token};
    session.reset();
    while (auto token = decoder->next(nullptr, 0, nullptr)) found.push_back(token->token);
    CHECK(found == expected);
  }
  {  // a step in flight when everything goes
    auto session = session_on(fixture(kMoe).open("cpu"), prompt(7));
    Decoder decoder(session, {}, 4);
    session.reset();
    decoder.next(nullptr, 0, nullptr);
  }
  {  // forks hold blocks of a session that is gone
    auto session = session_on(fixture(kMoe).open("cpu"), prompt(7));
    auto fork = session->fork();
    session.reset();
    CHECK(generate(fork, 4) == expected);
  }
  {  // a bad file is refused when it is opened
    Fixture f = fixture(kMoe);
    f.weights[0].parts.begin()->second.file += ".missing";
    CHECK_THROWS(CheckpointError, f.open("cpu"));
    f = fixture(kMoe);
    for (auto& w : f.weights)
      for (auto& [name, p] : w.parts) p.file_bytes++;
    CHECK_THROWS(CheckpointError, f.open("cpu"));
    f = fixture(kMoe);
    f.weights[0].parts.begin()->second.bytes--;
    CHECK_THROWS(CheckpointError, f.open("cpu"));
  }
}

}  // namespace
}  // namespace lily::test
