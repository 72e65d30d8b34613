// Hazards, stages and schedules: hand-made programs, then the programs of the fixtures by brute force over all pairs of dispatches.
#include <algorithm>

#include "check.hpp"
#include "fixture.hpp"
#include "graph/program.hpp"

namespace lily::test {
namespace {

constexpr Symbol kA = 0, kB = 1;

BufferUse use(Symbol s, uint64_t begin, uint64_t end, Access access) { return {s, begin, end - begin, access}; }
BufferUse reads(Symbol s, uint64_t begin, uint64_t end) { return use(s, begin, end, Access::read); }
BufferUse writes(Symbol s, uint64_t begin, uint64_t end) { return use(s, begin, end, Access::write); }
BufferUse updates(Symbol s, uint64_t begin, uint64_t end) { return use(s, begin, end, Access::read_write); }

// The stage of each dispatch.
std::vector<uint32_t> stage_of(const Stages& stages, size_t dispatches) {
  std::vector<uint32_t> stage(dispatches, ~0u);
  for (uint32_t s = 0; s < stages.size(); s++)
    for (uint32_t d : stages[s]) {
      CHECK(d < dispatches && stage[d] == ~0u);  // each one once
      stage[d] = s;
    }
  for (uint32_t s : stage) CHECK(s != ~0u);
  return stage;
}

std::vector<uint32_t> staged(const std::vector<std::vector<BufferUse>>& dispatches) {
  Program p(kA);
  for (const auto& uses : dispatches) {
    Dispatch d;
    d.uses = uses;
    p.record(d);
  }
  return stage_of(p.stages(), dispatches.size());
}

using Expected = std::vector<uint32_t>;

LILY_TEST(graph_hazards) {
  CHECK(staged({{writes(kA, 0, 8)}, {reads(kA, 0, 8)}}) == Expected({0, 1}));                        // read after write
  CHECK(staged({{reads(kA, 0, 8)}, {writes(kA, 0, 8)}}) == Expected({0, 1}));                        // write after read
  CHECK(staged({{writes(kA, 0, 8)}, {writes(kA, 0, 8)}}) == Expected({0, 1}));                       // write after write
  CHECK(staged({{reads(kA, 0, 8)}, {reads(kA, 0, 8)}, {reads(kA, 4, 6)}}) == Expected({0, 0, 0}));   // readers go together
  CHECK(staged({{updates(kA, 0, 8)}, {updates(kA, 0, 8)}, {updates(kA, 0, 8)}}) == Expected({0, 1, 2}));
  CHECK(staged({{writes(kA, 0, 8)}, {writes(kA, 8, 16)}, {reads(kA, 0, 16)}}) == Expected({0, 0, 1}));  // disjoint ranges
  CHECK(staged({{writes(kA, 0, 8)}, {writes(kB, 0, 8)}}) == Expected({0, 0}));
  CHECK(staged({{writes(kA, 0, 8)}, {BufferUse{}, reads(kB, 0, 8)}, {BufferUse{}}}) == Expected({0, 0, 0}));  // absent buffers
}

LILY_TEST(graph_partial_overlaps) {
  CHECK(staged({{writes(kA, 0, 8)}, {reads(kA, 7, 9)}, {reads(kA, 8, 9)}}) == Expected({0, 1, 0}));
  // a write that covers a part only: the rest of the older write still counts
  CHECK(staged({{writes(kA, 0, 16)}, {writes(kA, 0, 8)}, {reads(kA, 8, 16)}, {reads(kA, 0, 8)}}) == Expected({0, 1, 1, 2}));
  // a write over two older ranges waits for the later of them
  CHECK(staged({{writes(kA, 0, 8)}, {updates(kA, 0, 8)}, {writes(kA, 8, 16)}, {writes(kA, 4, 12)}, {reads(kA, 15, 16)}}) == Expected({0, 1, 0, 2, 1}));
  // a reader that starts late holds up a later write of the same range
  CHECK(staged({{writes(kB, 0, 8)}, {reads(kA, 0, 8), reads(kB, 0, 8)}, {reads(kA, 0, 8)}, {writes(kA, 0, 8)}}) == Expected({0, 1, 0, 2}));
  // one dispatch may name a buffer twice
  CHECK(staged({{reads(kA, 0, 8), writes(kA, 0, 8)}, {reads(kA, 0, 4), reads(kA, 4, 8)}}) == Expected({0, 1}));
}

bool conflict(const Dispatch& a, const Dispatch& b) {
  for (const BufferUse& x : a.uses)
    for (const BufferUse& y : b.uses)
      if (x.symbol != kNoSymbol && x.symbol == y.symbol && (x.access != Access::read || y.access != Access::read) && x.offset < y.offset + y.bytes && y.offset < x.offset + x.bytes) return true;
  return false;
}

// Every pair that conflicts stands in different stages, in the order of recording, and no dispatch later than its conflicts ask.
void check_stages(const Program& p) {
  const auto& d = p.dispatches();
  const std::vector<uint32_t> stage = stage_of(p.stages(), d.size());
  for (size_t j = 0; j < d.size(); j++) {
    uint32_t earliest = 0;
    for (size_t i = 0; i < j; i++)
      if (conflict(d[i], d[j])) {
        if (stage[i] >= stage[j]) fail(__FILE__, __LINE__, d[i].label + " and " + d[j].label + " conflict and are not in order");
        earliest = std::max(earliest, stage[i] + 1);
      }
    if (stage[j] != earliest) fail(__FILE__, __LINE__, d[j].label + " is in stage " + std::to_string(stage[j]) + ", not " + std::to_string(earliest));
  }
}

LILY_TEST(graph_random_programs) {
  uint64_t state = 1;
  auto draw = [&](uint64_t n) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return (state >> 33) % n;
  };
  for (int round = 0; round < 300; round++) {
    Program p(kA);
    for (int i = 0; i < 30; i++) {
      Dispatch d;
      d.label = std::to_string(i);
      for (uint64_t n = 1 + draw(3); n > 0; n--) {
        uint64_t begin = draw(12);
        d.uses.push_back(use(Symbol(draw(2)), begin, begin + 1 + draw(6), Access(draw(3))));
      }
      p.record(d);
    }
    check_stages(p);
  }
}

LILY_TEST(graph_programs_of_the_fixtures) {
  for (const char* name : {kMoe, kDense})
    for (DType storage : {DType::bf16, DType::f32}) {
      const Model model(fixture(name).spec, fixture(name).weights, storage);
      for (bool fused : {true, false}) {
        for (const DeviceTraits& traits : {DeviceTraits{}, device_traits("metal")}) {
          const Policy policy{fused, "test", traits};
          for (uint32_t context : {1u, 300u, 100000u}) check_stages(model.decode(context, policy));
          for (uint32_t rows : {1u, 16u, 300u})
            for (bool all : {false, true}) check_stages(model.prefill(rows, all, rows, policy));
          check_stages(model.prefill(64, false, 100000, policy));
        }
      }
      check_stages(model.sampler());
      check_stages(model.head_step());
      for (bool score : {false, true}) check_stages(model.head_rows(64, score));
      const Program fused = model.decode(1, {true, ""}), unfused = model.decode(1, {false, ""});
      CHECK(fused.dispatches().size() < unfused.dispatches().size() && fused.stages().size() < unfused.stages().size());
    }
}

// The kernel that meets the keys in a decode step of one attention layer.
std::string split_kernel(const AttentionShape& m, uint32_t context, const DeviceTraits& traits) {
  Symbol next = 0;
  auto linear = [&](uint32_t rows, uint32_t cols) {
    Linear w;
    w.format = {LILY_W_BF16, 0, 0};
    w.rows = rows;
    w.cols = cols;
    w.codes = next++;
    return w;
  };
  auto vector = [&](uint32_t size) { return Vector{next++, size}; };
  const AttentionWeights w{linear(2 * m.Hq * m.D, m.H), linear(m.Hkv * m.D, m.H), linear(m.Hkv * m.D, m.H), linear(m.H, m.Hq * m.D), vector(m.D), vector(m.D)};
  const Vector norm = vector(m.H);
  const KvUse kv{next, next + 1, next + 2, kUnbounded};
  Program p(next + 3);
  Recorder r{p, DType::bf16, {true, "test", traits}};
  attention_step(r, {next + 4, 0, sizeof(LilyStep), Access::read}, "layer", m, w, norm, kv, context, {r.floats("h", m.H), r.floats("ssq", m.H / LILY_SSQ_BLOCK)});
  std::string found;
  for (const Dispatch& d : p.dispatches())
    if (d.label == "layer.split") found = d.kernel;
  return found;
}

// On GPUs a step that sees 32,768 tokens and more takes the form with a fixed number of splits, for head dim 256 and 8 query heads a key head.
LILY_TEST(graph_decode_attention_changes_its_form_at_32768_tokens) {
  const AttentionShape m{64, 8, 1, 256, 64, 1e7f, 1e-6f}, other_ratio{64, 4, 1, 256, 64, 1e7f, 1e-6f}, other_dim{64, 8, 1, 128, 64, 1e7f, 1e-6f};
  const DeviceTraits gpu = device_traits("metal");
  for (uint32_t context : {1u, 16385u, 32767u}) CHECK_EQUAL(split_kernel(m, context, gpu), std::string("attn_split"));
  for (uint32_t context : {32768u, 32769u, 262144u}) {
    CHECK_EQUAL(split_kernel(m, context, gpu), std::string("attn_split_long"));
    for (const AttentionShape& other : {other_ratio, other_dim}) CHECK_EQUAL(split_kernel(other, context, gpu), std::string("attn_split"));
    CHECK_EQUAL(split_kernel(m, context, {}), std::string("attn_split"));  // the CPU has one form
  }
  // One program for all contexts between two edges: of the split plans, and of the form.
  for (uint32_t context : {1u, 256u, 257u, 16384u, 16385u, 32767u, 32768u, 32769u, 65536u, 65537u}) {
    const uint32_t end = decode_bucket(gpu, context), next = decode_bucket(gpu, end + 1);
    CHECK(context <= end && end < next);
    CHECK_EQUAL(split_kernel(m, context, gpu), split_kernel(m, end, gpu));
    CHECK_EQUAL(split_plan(context).blocks_per_split, split_plan(end).blocks_per_split);
    CHECK_EQUAL(split_plan(context).n_splits, split_plan(end).n_splits);
  }
  CHECK_EQUAL(decode_bucket(gpu, 20000), 32767u);
  CHECK_EQUAL(decode_bucket(gpu, 32768), 32768u);
  CHECK_EQUAL(decode_bucket({}, 20000), 32768u);
}

// On GPUs attention of a chunk is cut by keys, so that no dispatch meets more than 32 blocks of 256 and the workspace does not grow with the context.
LILY_TEST(graph_prefill_attention_is_cut_by_keys) {
  const Model model(fixture(kMoe).spec, fixture(kMoe).weights, DType::bf16);
  const Policy policy{true, "test", device_traits("metal")};
  uint64_t workspace = 0;
  for (uint32_t context : {16384u, 32768u, 262144u}) {
    const Program p = model.prefill(64, false, context, policy);
    uint32_t met = 0;  // blocks of keys, in order and without a gap
    std::string layer;
    for (const Dispatch& d : p.dispatches()) {
      if (d.kernel != "attn_rows") continue;
      const auto& a = *reinterpret_cast<const LilyAttnArgs*>(d.args.data());
      if (d.label != layer) layer = d.label, met = 0;
      CHECK(a.first_block == met && a.key_blocks == 32);
      met += a.key_blocks;
    }
    CHECK(!layer.empty() && met * LILY_KV_BLOCK >= context);
    CHECK(workspace == 0 || p.workspace_bytes() == workspace);
    workspace = p.workspace_bytes();
  }
}

LILY_TEST(graph_schedules) {
  const Model model(fixture(kMoe).spec, fixture(kMoe).weights, DType::f32);
  const Program p = model.decode(1, {true, ""});
  const size_t n = p.dispatches().size();
  const Stages planned = p.stages();
  const std::vector<uint32_t> stage = stage_of(planned, n);
  CHECK(p.order(Schedule::parse("stages")) == planned);
  CHECK(p.order(Schedule::parse("")) == planned);

  const Stages serial = p.order(Schedule::parse("serial"));
  CHECK_EQUAL(serial.size(), n);
  for (uint32_t i = 0; i < n; i++) CHECK(serial[i] == std::vector<uint32_t>{i});

  // one dispatch at a time, never before one of an earlier stage; seeds differ
  const Stages shuffled = p.order(Schedule::parse("shuffle:1"));
  const std::vector<uint32_t> place = stage_of(shuffled, n);
  CHECK_EQUAL(shuffled.size(), n);
  for (size_t i = 0; i < n; i++)
    for (size_t j = 0; j < n; j++) CHECK(stage[i] >= stage[j] || place[i] < place[j]);
  CHECK(shuffled == p.order(Schedule::parse("shuffle:1")));
  CHECK(shuffled != p.order(Schedule::parse("shuffle:2")) && shuffled != serial);

  // without the barrier after stage 0 some seed puts a dispatch of stage 1 first; the other stages stay apart
  bool early = false;
  for (int seed = 0; seed < 40; seed++) {
    const std::vector<uint32_t> at = stage_of(p.order(Schedule::parse("shuffle:" + std::to_string(seed) + ":drop:0")), n);
    for (size_t i = 0; i < n; i++)
      for (size_t j = 0; j < n; j++) {
        if (stage[i] >= stage[j] || at[i] < at[j]) continue;
        CHECK(stage[i] == 0 && stage[j] == 1);
        early = true;
      }
  }
  CHECK(early);
  CHECK_EQUAL(p.order(Schedule::parse("shuffle:1:drop:100000")).size(), n);  // no such barrier
  for (const char* bad : {"shuffle", "shuffle:", "shuffle:x", "shuffle:1:drop:", "shuffle:1:drop:x", "parallel", "shuffle:-1"}) CHECK_THROWS(InvalidArgument, Schedule::parse(bad));
}

LILY_TEST(graph_workspace_slots) {
  Program p(kA);
  const Slot a = p.workspace("a", 65), b = p.workspace("b", 1), again = p.workspace("a", 65);
  CHECK(a.offset == 0 && b.offset == 128 && again.offset == a.offset && again.bytes == 65);
  CHECK_EQUAL(p.workspace_bytes(), 192u);
  CHECK_THROWS(Error, p.workspace("a", 64));
}

}  // namespace
}  // namespace lily::test
