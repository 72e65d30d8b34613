// One byte budget: what the device holds stays below it while arenas grow, and what is kept for reuse makes room before anything fails.
#include <algorithm>
#include <cstring>
#include <thread>

#include "check.hpp"
#include "fixture.hpp"

namespace lily::test {
namespace {

// Memory of which every byte alive is counted.
struct CountingDevice : Device {
  struct Block : Buffer {
    Block(CountingDevice& device, uint64_t bytes) : device(device), data(bytes) {
      device.alive += bytes;
      device.most = std::max(device.most, device.alive);
    }
    ~Block() override { device.alive -= data.size(); }
    uint8_t* host() override { return data.data(); }
    uint64_t bytes() const override { return data.size(); }
    CountingDevice& device;
    std::vector<uint8_t> data;
  };
  BufferPtr allocate(uint64_t bytes) override {
    if (allocations++ == fails_at) throw OutOfMemoryError("a buffer", bytes, 0, "none");
    return std::make_shared<Block>(*this, bytes);
  }
  DeviceInfo info() const override { return {}; }
  DType storage() const override { return DType::bf16; }
  BufferPtr wrap(const uint8_t*, uint64_t, std::shared_ptr<void>) override { return nullptr; }
  PreparedPtr prepare(std::vector<Dispatch>, Stages) override { return nullptr; }
  TicketPtr submit(Submission) override { return nullptr; }
  int in_flight() const override { return 0; }
  Counters counters() const override { return {}; }
  void fail_at(int, int) override {}
  uint64_t alive = 0, most = 0;
  int allocations = 0, fails_at = -1;
};

constexpr uint64_t kBlock = 1000;
constexpr uint32_t kLayers = 3;
constexpr uint64_t kEach = kBlock * 2 * kLayers;  // bytes of one block in all arenas

struct Arenas {
  explicit Arenas(uint64_t limit) : budget(std::make_shared<MemoryBudget>(limit)), kv(std::make_shared<KvCache>(device, budget, kLayers, kBlock, [] {})) {}
  std::shared_ptr<CountingDevice> device = std::make_shared<CountingDevice>();
  std::shared_ptr<MemoryBudget> budget;
  std::shared_ptr<KvCache> kv;
  std::vector<KvBlockPtr> blocks;
  void take(int n) {
    for (int i = 0; i < n; i++) blocks.push_back(kv->allocate());
  }
};

LILY_TEST(limits_hold_while_arenas_grow) {
  for (uint64_t limit : {kEach * 4, kEach * 9 + 5, kEach * 40, kEach * 41 + 3 * kBlock}) {
    Arenas a(limit);
    CHECK_THROWS(OutOfMemoryError, a.take(1000));
    CHECK(a.device->most <= limit);  // the copy of an arena included
    CHECK_EQUAL(a.budget->used(MemoryKind::kv), a.device->alive);
    CHECK(a.device->alive + kEach + a.device->alive / (2 * kLayers) > limit);  // not even one more block and its copy would fit
  }
}

LILY_TEST(limits_are_given_back_by_empty_arenas) {
  Arenas a(1 << 20);
  a.take(20);
  for (auto& block : a.blocks) std::memset(a.kv->v(2)->host() + block->index() * kBlock, int(block->index()), kBlock);
  const uint64_t full = a.device->alive;
  CHECK(!a.kv->shrink());  // in use to the end
  a.blocks.erase(a.blocks.begin() + 3, a.blocks.end());
  CHECK(a.kv->shrink());
  CHECK_EQUAL(a.device->alive, 3 * kEach);
  CHECK_EQUAL(a.budget->used(MemoryKind::kv), a.device->alive);
  CHECK(a.device->alive < full);
  for (auto& block : a.blocks)
    for (uint64_t i = 0; i < kBlock; i++) CHECK_EQUAL(int(a.kv->v(2)->host()[block->index() * kBlock + i]), int(block->index()));
  a.take(40);
  std::vector<uint32_t> indices;
  for (auto& block : a.blocks) indices.push_back(block->index());
  std::sort(indices.begin(), indices.end());
  CHECK(std::adjacent_find(indices.begin(), indices.end()) == indices.end());
  a.blocks.clear();
  CHECK(a.kv->shrink());
  CHECK_EQUAL(a.device->alive, 0u);
  a.take(2);
}

LILY_TEST(limits_survive_a_device_that_refuses_half_way) {
  for (int fails_at = 0; fails_at < 2 * int(kLayers); fails_at++) {
    Arenas a(1 << 20);
    a.take(4);
    a.device->fails_at = a.device->allocations + fails_at;
    CHECK_THROWS(OutOfMemoryError, a.take(1));
    CHECK_EQUAL(a.budget->used(MemoryKind::kv), a.device->alive);
    a.take(5);
    CHECK_EQUAL(a.budget->used(MemoryKind::kv), a.device->alive);
    CHECK_EQUAL(a.kv->k(0)->bytes(), a.kv->v(kLayers - 1)->bytes());
  }
}

// 3 blocks of 4, and of more where the device refuses one of the smaller arenas: contents stay, and no block is given out that an arena lacks.
LILY_TEST(limits_are_given_back_by_arenas_that_are_nearly_full) {
  for (int fails_at = -1; fails_at < 2 * int(kLayers); fails_at++) {
    Arenas a(1 << 20);
    a.take(fails_at < 0 ? 4 : 20);
    for (auto& block : a.blocks) std::memset(a.kv->k(1)->host() + block->index() * kBlock, int(block->index()), kBlock);
    a.blocks.erase(a.blocks.begin() + 3, a.blocks.end());
    if (fails_at < 0) CHECK(!a.kv->shrink());
    if (fails_at >= 0) a.device->fails_at = a.device->allocations + fails_at;
    CHECK(a.kv->shrink(true));
    CHECK(!a.kv->shrink(true));
    if (fails_at < 0) CHECK_EQUAL(a.device->alive, 3 * kEach);
    CHECK_EQUAL(a.budget->used(MemoryKind::kv), a.device->alive);
    a.take(30);
    CHECK_EQUAL(a.budget->used(MemoryKind::kv), a.device->alive);
    for (uint32_t layer = 0; layer < kLayers; layer++)
      for (auto& block : a.blocks) CHECK(a.kv->k(layer)->bytes() >= (block->index() + 1) * kBlock && a.kv->v(layer)->bytes() >= (block->index() + 1) * kBlock);
    for (size_t b = 0; b < 3; b++)
      for (uint64_t i = 0; i < kBlock; i++) CHECK_EQUAL(int(a.kv->k(1)->host()[a.blocks[b]->index() * kBlock + i]), int(a.blocks[b]->index()));
  }
}

const Ids& prompt(uint32_t length) { return fixture(kMoe).prompts.at(length).ids; }

std::shared_ptr<Session> session_on(const std::shared_ptr<Engine>& engine, const Ids& ids) {
  auto session = std::make_shared<Session>(engine);
  append(*session, ids);
  return session;
}

std::shared_ptr<Engine> with_room(uint64_t bytes) {
  auto engine = fixture(kMoe).open("cpu", fixture(kMoe).open("cpu")->memory().weights + bytes);
  engine->set_chunk(64);
  return engine;
}

LILY_TEST(limits_take_from_what_is_kept_for_reuse) {
  auto engine = with_room(12 << 20);
  auto used = session_on(engine, prompt(64));
  const auto expected = logits(*used);
  std::vector<std::shared_ptr<Session>> kept;
  for (int i = 0; i < 100; i++) {
    kept.push_back(session_on(engine, prompt(7)));
    engine->sessions().keep(kept.back());
    engine->sessions().keep(kept.front());  // used again each time
  }
  const size_t gone = size_t(std::count_if(kept.begin(), kept.end(), [](const auto& s) { return s->evicted(); }));
  CHECK(gone > 0 && gone < kept.size());
  CHECK(!kept.front()->evicted() && !kept.back()->evicted());
  for (size_t i = 2; i < kept.size(); i++) CHECK(kept[i - 1]->evicted() || !kept[i]->evicted());  // the longest unused went first
  auto evicted = std::find_if(kept.begin(), kept.end(), [](const auto& s) { return s->evicted(); });
  CHECK((*evicted)->tokens().empty());
  CHECK_THROWS(InvalidArgument, (*evicted)->fork());
  CHECK_THROWS(InvalidArgument, append(**evicted, {1}));
  CHECK(logits(*used) == expected);
  const MemoryReport m = engine->memory();
  CHECK(m.weights + m.kv + m.states + m.snapshots + m.workspace + m.requests <= m.limit);
}

// Threads whose sessions take memory from each other's forks that are kept, and each other's snapshots. Room for what is in use at once: three states a thread
// (the current one, two steps in flight), the zero state, keys, values and the workspace; far less than for all forks as well.
LILY_TEST(limits_between_threads) {
  constexpr size_t kThreads = 3;
  const uint64_t state = with_room(16 << 20)->state_bytes();
  auto engine = with_room((3 * kThreads + 1) * state + (8 << 20));
  const auto expected = generate(session_on(engine, prompt(64)), 6);
  std::vector<std::thread> threads;
  std::vector<std::vector<std::shared_ptr<Session>>> kept(kThreads);
  std::vector<std::string> wrong(kThreads);
  for (size_t t = 0; t < kThreads; t++)
    threads.emplace_back([&, t] {
      try {
        for (int i = 0; i < 5; i++) {
          auto session = session_on(engine, prompt(64));
          kept[t].push_back(session->fork());
          engine->sessions().keep(kept[t].back());
          if (generate(session, 6) != expected) wrong[t] = "other ids";
          held_bytes(kept[t]);
          engine->memory();
          engine->trim();
        }
      } catch (const std::exception& e) {  // out of a thread it would end the program
        wrong[t] = e.what();
      }
    });
  for (auto& t : threads) t.join();
  for (const std::string& what : wrong) CHECK_EQUAL(what, "");
  size_t evicted = 0;
  for (const auto& forks : kept) evicted += size_t(std::count_if(forks.begin(), forks.end(), [](const auto& s) { return s->evicted(); }));
  CHECK(evicted > 0);
}

// Snapshots give way to work of another session, whoever holds them, but not to another snapshot; a rewind then reads from the beginning.
LILY_TEST(limits_take_snapshots_of_other_sessions) {
  auto engine = with_room(16 << 20);
  auto session = std::make_shared<Session>(engine);
  session->append(prompt(64).data(), 64, {}, {}, {16, 32, 48});
  auto fork = session->fork();
  const Ids expected = generate(session, 3);
  CHECK_EQUAL(fork->view().snapshots.size(), 4u);
  std::vector<StatePtr> states;
  CHECK_THROWS(OutOfMemoryError, for (;;) states.push_back(engine->new_state(Need::snapshot)));
  CHECK_EQUAL(fork->view().snapshots.size(), 4u);
  CHECK_THROWS(OutOfMemoryError, for (;;) states.push_back(engine->new_state()));
  CHECK(fork->view().snapshots == std::vector<uint32_t>{64});  // where it stands itself
  CHECK(session->view().snapshots == std::vector<uint32_t>{64});
  states.clear();
  CHECK_EQUAL(fork->rewind(40, {}, {}).kept, 0u);
  append(*fork, part(prompt(64), 40, 64));
  CHECK(generate(fork, 3) == expected);
}

// A state is refused only after the arenas' empty end was given back: here a session that was never kept for reuse left it.
LILY_TEST(limits_give_arenas_to_states) {
  auto engine = with_room(16 << 20);
  { auto gone = session_on(engine, prompt(64)); }
  const uint64_t kv = engine->memory().kv;
  CHECK(kv > 0);
  std::vector<StatePtr> states;
  CHECK_THROWS(OutOfMemoryError, for (;;) states.push_back(engine->new_state()));
  CHECK_EQUAL(engine->memory().kv, 0u);
  CHECK(engine->memory().limit - engine->memory().weights - engine->memory().workspace - states.size() * engine->state_bytes() < 2 * engine->state_bytes());
  states.clear();
  session_on(engine, prompt(64));
}

}  // namespace
}  // namespace lily::test
