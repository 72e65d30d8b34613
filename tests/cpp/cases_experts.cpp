// Mixture of experts: routing, the chosen experts of decode, the grouped products of prefill.
#include <algorithm>

#include "kernel_case.hpp"

namespace lily::test {
namespace {

struct Experts {
  uint32_t E, k, K, I;  // of k chosen experts [I, K]
  const char *a, *b;    // formats: gate (or down, or W) and up (or shared down)
  uint32_t gap;         // rows between experts that belong to another matrix
  std::string label() const { return std::string(a) + "/" + b + " " + std::to_string(k) + " of " + std::to_string(E) + ", " + std::to_string(I) + "x" + std::to_string(K); }
};

const Experts kShapes[] = {
    {16, 4, 256, 64, "4g64", "4g64", 0}, {3, 3, 64, 17, "4g64", "8g64", 0}, {9, 1, 192, 80, "8g64", "4g64", 5}, {5, 2, 96, 65, "bf16", "f16", 65},
    {33, 16, 128, 16, "5g128", "3g64", 0}, {2, 2, 320, 15, "6g32", "f32", 1},  {8, 8, 2048, 1, "4g64", "2g32", 0},
};

// From the first expert's first row to the last expert's last: nothing behind it.
TestWeight stack(Random& r, const char* format, uint32_t E, uint32_t rows, uint32_t gap, uint32_t K) {
  return r.weight(format_of(format), uint64_t(E - 1) * (rows + gap) + rows, K);
}

Words distinct(Random& r, uint32_t E, uint32_t k) {
  Words all(E);
  for (uint32_t e = 0; e < E; e++) all[e] = e;
  for (uint32_t i = 0; i < k; i++) std::swap(all[i], all[i + r.below(E - i)]);
  all.resize(k);
  return all;
}

void add_step(std::vector<Case>& cases, Random& r, const Experts& x) {
  LilyMoeArgs a{};
  a.a = format_of(x.a);
  a.b = format_of(x.b);
  a.K = x.K;
  a.I = x.I;
  a.E = x.E;
  a.k = x.k;
  a.a_stride = a.b_stride = x.I + x.gap;
  a.eps = 1e-6f;
  const Floats h = r.normals(x.K);
  std::vector<Operand> buffers{floats(h), floats(partial_squares(h)), floats(r.normals(x.K)), floats(r.normals(x.E)), out_words(x.k), out_floats(x.k), out_acts(size_t(x.k) * x.I)};
  stack(r, x.a, x.E, x.I, x.gap, x.K).push(buffers);
  stack(r, x.b, x.E, x.I, x.gap, x.K).push(buffers);
  cases.push_back(make_case("moe_gate_up", x.label(), a, buffers, x.k * groups_of(x.I, 16)));
  a.ninth = 1;
  a.S = 2 * x.I + 1;
  r.weight(a.a, a.S, x.K).push(buffers);
  r.weight(a.b, a.S, x.K).push(buffers);
  buffers.push_back(out_acts(a.S));
  cases.push_back(make_case("moe_gate_up", x.label() + " and a shared one", a, buffers, x.k * groups_of(x.I, 16) + groups_of(a.S, 16)));

  for (uint32_t each : {0u, 1u}) {
    a.per_expert_input = each;
    buffers = {words(distinct(r, x.E, x.k)), acts(r.normals(size_t(each ? x.k : 1) * x.K)), out_floats(size_t(x.k) * x.I)};
    stack(r, x.a, x.E, x.I, x.gap, x.K).push(buffers);
    cases.push_back(make_case("moe_gemv", x.label(), a, buffers, x.k * groups_of(x.I, 16)));
  }

  // down: from the experts' width to the stream's; here the roles of K and I change
  LilyMoeArgs d = a;
  d.I = x.K;
  d.H = x.I;
  d.S = x.K % 128 ? 192 : 2 * x.K;
  if (d.S % std::max(d.b.group, 32u)) d.S = 256;
  buffers = {acts(r.normals(size_t(x.k) * d.I)), words(distinct(r, x.E, x.k)), floats(r.normals(x.k, 0.3f)), acts(r.normals(d.S)), floats(r.normals(1)),
             floats(r.normals(d.H), Role::inout), out_floats(groups_of(d.H, 16))};
  stack(r, x.a, x.E, d.H, x.gap, d.I).push(buffers);
  r.weight(d.b, d.H, d.S).push(buffers);
  cases.push_back(make_case("moe_down", x.label(), d, buffers, groups_of(d.H, 16)));
}

// What moe_group gives for random choices.
struct Routing {
  Words ids, offsets, slot_row, slot_of;
  Words counts, base;  // of each block of 64 rows: what moe_histogram and moe_scan give
  Routing(Random& r, uint32_t T, uint32_t E, uint32_t k)
      : offsets(E + 1), slot_row(size_t(T) * k), slot_of(size_t(T) * k), counts(size_t(groups_of(T, 64)) * E), base(size_t(groups_of(T, 64)) * E) {
    for (uint32_t t = 0; t < T; t++)
      for (uint32_t e : distinct(r, E, k)) ids.push_back(e);
    uint32_t slot = 0;
    for (uint32_t e = 0; e < E; e++) {
      for (uint32_t i = 0; i < ids.size(); i++)
        if (ids[i] == e) slot_row[slot] = i / k, slot_of[i] = slot++;
      offsets[e + 1] = slot;
    }
    for (uint32_t i = 0; i < ids.size(); i++) counts[size_t(i / k / 64) * E + ids[i]]++;
    for (uint32_t e = 0; e < E; e++) {
      uint32_t at = offsets[e];
      for (uint32_t b = 0; b < groups_of(T, 64); b++) base[size_t(b) * E + e] = at, at += counts[size_t(b) * E + e];
    }
  }
};

void add_rows(std::vector<Case>& cases, Random& r, const Experts& x, uint32_t T) {
  const std::string label = x.label() + ", " + std::to_string(T) + " rows";
  const Routing routing(r, T, x.E, x.k);
  LilyMoeRowsArgs a{};
  a.a = format_of(x.a);
  a.b = format_of(x.b);
  a.K = x.K;
  a.N = x.I;
  a.E = x.E;
  a.k = x.k;
  a.H = x.I;
  a.a_stride = a.b_stride = x.I + x.gap;
  const size_t slots = size_t(T) * x.k;
  cases.push_back(make_case("moe_topk_rows", label, a, {live_rows(T), floats(r.normals(size_t(T) * x.E)), out_words(slots), out_floats(slots)}, T + 4));
  cases.push_back(make_case("moe_group", label, a, {live_rows(T), words(routing.ids), out_words(x.E + 1), out_words(slots), out_words(slots)}, 1));
  LilyRouteArgs route{x.E, x.k, T, 16, 2 * x.I, x.K};
  const uint32_t row_blocks = uint32_t(groups_of(T, 64));
  cases.push_back(make_case("moe_histogram", label, route, {live_rows(T), words(routing.ids), out_words(routing.counts.size())}, row_blocks));
  cases.push_back(make_case("moe_scan", label, route,
                            {live_rows(T), words(routing.counts), out_words(x.E + 1), out_words(routing.base.size()), out_words(4 * (groups_of(slots, 16) + x.E)), out_words(6)}, 1));
  cases.push_back(make_case("moe_scatter", label, route, {live_rows(T), words(routing.ids), words(routing.base), out_words(slots), out_words(slots)}, row_blocks));
  const uint32_t groups = x.E * groups_of(x.I, 64);
  for (uint32_t by_slot : {0u, 1u}) {
    a.by_slot = by_slot;
    std::vector<Operand> buffers{words(routing.offsets), words(routing.slot_row), acts(r.normals((by_slot ? slots : T) * x.K)), out_floats(slots * x.I)};
    stack(r, x.a, x.E, x.I, x.gap, x.K).push(buffers);
    cases.push_back(make_case("moe_gemm_rows", label, a, buffers, groups));
  }
  std::vector<Operand> buffers{words(routing.offsets), words(routing.slot_row), acts(r.normals(size_t(T) * x.K)), out_acts(slots * x.I)};
  stack(r, x.a, x.E, x.I, x.gap, x.K).push(buffers);
  stack(r, x.b, x.E, x.I, x.gap, x.K).push(buffers);
  cases.push_back(make_case("moe_gate_up_rows", label, a, buffers, groups));
  for (bool ordered : {false, true})
    cases.push_back(make_case("moe_combine_rows", label, a,
                              {live_rows(T), ordered ? absent() : words(routing.slot_of), floats(r.normals(slots, 0.3f)), floats(r.normals(slots * x.I)), floats(r.normals(size_t(T) * x.I)),
                               floats(r.normals(T)), floats(r.normals(size_t(T) * x.I), Role::inout)},
                              T + 4));
}

}  // namespace

std::vector<Case> expert_cases() {
  std::vector<Case> cases;
  Random r(2);
  uint32_t turn = 0;
  for (const Experts& x : kShapes) {
    add_step(cases, r, x);
    const uint32_t rows[] = {1, 17, 5, 64, 3, 16, 2};
    add_rows(cases, r, x, rows[turn++ % 7]);
  }
  // one expert gets more rows than a pass takes
  add_rows(cases, r, {2, 2, 64, 33, "4g64", "4g64", 0}, 257);
  return cases;
}

}  // namespace lily::test
