#include "ops/moe.hpp"

#include <algorithm>
#include <tuple>

#include "base/error.hpp"
#include "ops/norm.hpp"

namespace lily {
namespace {

LilyMoeArgs step_args(const MoeShape& m, const Linear& a, const Linear& b) {
  LilyMoeArgs args{};
  args.a = a.format;
  args.b = b.format;
  args.K = m.H;
  args.I = m.I;
  args.S = m.S;
  args.H = m.H;
  args.E = m.E;
  args.k = m.k;
  args.a_stride = a.expert_stride;
  args.b_stride = b.expert_stride;
  args.eps = m.eps;
  return args;
}

LilyMoeRowsArgs rows_args(const MoeShape& m, const Linear& a, const Linear& b) {
  LilyMoeRowsArgs args{};
  args.a = a.format;
  args.b = b.format;
  args.K = a.cols;
  args.N = a.rows;
  args.E = m.E;
  args.k = m.k;
  args.H = m.H;
  args.a_stride = a.expert_stride;
  args.b_stride = b.expert_stride;
  return args;
}

// Of stacked experts a step reads k, a chunk at most all.
void count_experts(Dispatch& d, const std::vector<const Linear*>& experts, uint32_t chosen) {
  for (const Linear* w : experts) {
    d.bytes_read -= w->span_rows() * (w->row_bytes() + w->row_groups() * 4);
    d.bytes_read += std::min(chosen, w->experts) * w->matrix_bytes();
  }
}

void record_fused(Recorder& r, const std::string& label, const MoeShape& m, const ExpertWeights& w, const Vector& norm, const Stream& s) {
  Slot logits = r.floats("router", m.E + 1), shared = r.acts("shared_act", m.S), act = r.acts("expert_act", uint64_t(m.k) * m.I);
  Slot ids = r.words("expert_ids", m.k), route = r.floats("expert_route", m.k);
  gemv_norm(r, label + ".gate", s, norm, m.eps, logits, {{&w.router, 0}, {&w.shared_router, m.E}});
  const bool ninth = r.policy.traits.ninth_expert;
  if (!ninth) gate_up_norm(r, label + ".shared_expert.gate_up", s, norm, m.eps, shared, w.shared_gate, w.shared_up);

  std::vector<BufferUse> uses{s.h.read(), s.ssq.read(), norm.read(), logits.part(0, m.E * 4).read(), ids.write(), route.write(), act.write()};
  push_weight(uses, w.gate);
  push_weight(uses, w.up);
  LilyMoeArgs args = step_args(m, w.gate, w.up);
  uint64_t groups = uint64_t(m.k) * blocks(m.I, LILY_ROW_BLOCK);
  if (ninth) {
    if (w.shared_gate.format_name() != w.gate.format_name() || w.shared_up.format_name() != w.up.format_name())
      throw DeviceError("moe_gate_up=ninth (" + label + "): the shared expert is " + w.shared_gate.format_name() + " and " + w.shared_up.format_name() + ", the others are " +
                        w.gate.format_name() + " and " + w.up.format_name() + "; all must have one format");
    push_weight(uses, w.shared_gate);
    push_weight(uses, w.shared_up);
    uses.push_back(shared.write());
    args.ninth = 1;
    groups += blocks(m.S, LILY_ROW_BLOCK);
  }
  Dispatch up = make_dispatch("moe_gate_up", label + ".experts.gate_up", args, uses, groups);
  up.format = w.gate.format_name();
  up.reason = r.policy.reason;
  count_experts(up, {&w.gate, &w.up}, m.k);
  r.program.record(std::move(up));

  uses = {act.read(), ids.read(), route.read(), shared.read(), logits.part(m.E * 4, 4).read(), s.h.update(), s.ssq.write()};
  push_weight(uses, w.down);
  push_weight(uses, w.shared_down);
  Dispatch down = make_dispatch("moe_down", label + ".experts.down", step_args(m, w.down, w.shared_down), uses, blocks(m.H, LILY_ROW_BLOCK));
  down.format = w.down.format_name();
  down.reason = r.policy.reason;
  count_experts(down, {&w.down}, m.k);
  r.program.record(std::move(down));
}

void expert_gemv(Recorder& r, const std::string& label, const MoeShape& m, const Linear& w, const Slot& ids, const Slot& x, const Slot& y, bool per_expert) {
  LilyMoeArgs a = step_args(m, w, w);
  a.K = w.cols;
  a.I = w.rows;  // output rows of W
  a.per_expert_input = per_expert;
  std::vector<BufferUse> uses{ids.read(), x.read(), y.write()};
  push_weight(uses, w);
  Dispatch d = make_dispatch("moe_gemv", label, a, uses, uint64_t(m.k) * blocks(w.rows, LILY_ROW_BLOCK));
  d.format = w.format_name();
  count_experts(d, {&w}, m.k);
  r.program.record(std::move(d));
}

// Order of the routed rows and the sum back into the stream: shared by the twin of the decode step and by prefill.
void topk(Recorder& r, const RowsOf& t, const std::string& label, const MoeShape& m, const Slot& logits, const Slot& ids, const Slot& route) {
  LilyMoeRowsArgs a{};
  a.E = m.E;
  a.k = m.k;
  Dispatch d = make_dispatch("moe_topk_rows", label + ".gate.topk", a, {t.step, logits.read(), ids.write(), route.write()}, t.rows);
  traced(d, label + ".gate.indices", 2, DType::u32);
  traced(d, label + ".gate.weights", 3);
  r.program.record(std::move(d));
}

void group(Recorder& r, const RowsOf& t, const std::string& label, const MoeShape& m, const Slot& ids, const Slot& offsets, const Slot& rows, const Slot& slots) {
  LilyMoeRowsArgs a{};
  a.E = m.E;
  a.k = m.k;
  r.program.record(make_dispatch("moe_group", label + ".group", a, {t.step, ids.read(), offsets.write(), rows.write(), slots.write()}, 1));
}

// The order of the routed rows as a GPU makes it: in blocks of 64 rows, with a map of tiles and the launch grids of both expert products.
struct TileMap {
  uint32_t tile_rows = 0;
  Slot tiles, gate_up_grid, down_grid;
};
TileMap map_tiles(Recorder& r, const RowsOf& t, const std::string& label, const MoeShape& m, const Slot& ids, const Slot& offsets, const Slot& rows, const Slot& slots) {
  LilyRouteArgs a{};
  a.E = m.E;
  a.k = m.k;
  a.T = t.rows;
  a.tile_rows = uint64_t(t.rows) * m.k > 16ull * m.E ? 32 : 16;  // by the mean rows of an expert
  if (r.policy.traits.tile_rows) a.tile_rows = r.policy.traits.tile_rows;
  a.N_a = r.policy.fused ? 2 * m.I : m.I;                        // gate and up side by side, or one of them
  a.N_b = m.H;
  const uint64_t B = blocks(t.rows, 64), max_tiles = blocks(uint64_t(t.rows) * m.k, a.tile_rows) + m.E;
  Slot counts = r.words("route_counts", B * m.E), base = r.words("route_base", B * m.E), tiles = r.words("route_tiles", max_tiles * 4), grids = r.words("route_grids", 6);
  r.program.record(make_dispatch("moe_histogram", label + ".route.histogram", a, {t.step, ids.read(), counts.write()}, B));
  Dispatch d = make_dispatch("moe_scan", label + ".route.scan", a, {t.step, counts.read(), offsets.write(), base.write(), tiles.write(), grids.write()}, 1);
  d.reason = "tiles of " + std::to_string(a.tile_rows) + " rows: " + std::to_string(uint64_t(t.rows) * m.k / std::max(1u, m.E)) + " rows an expert in the mean";
  r.program.record(std::move(d));
  r.program.record(make_dispatch("moe_scatter", label + ".route.scatter", a, {t.step, ids.read(), base.read(), rows.write(), slots.write()}, B));
  return {a.tile_rows, tiles, grids.part(0, 12), grids.part(12, 12)};
}

// A grouped product takes its grid from the tile map where there is one.
void use_tiles(Dispatch& d, const TileMap& map, const Slot& grid) {
  if (!map.tile_rows) return;
  reinterpret_cast<LilyMoeRowsArgs*>(d.args.data())->tile_rows = map.tile_rows;
  d.uses.push_back(map.tiles.read());
  d.uses.push_back(grid.read());
  d.indirect = int(d.uses.size()) - 1;
}

void combine(Recorder& r, const RowsOf& t, const std::string& label, const MoeShape& m, const Slot& slots, const Slot& route, const Slot& y, const Slot& shared,
             const Slot& shared_logit, const Slot& h) {
  LilyMoeRowsArgs a{};
  a.k = m.k;
  a.H = m.H;
  r.program.record(make_dispatch("moe_combine_rows", label + ".combine", a, {t.step, slots.bytes ? slots.read() : BufferUse{}, route.read(), y.read(), shared.read(), shared_logit.read(), h.update()}, t.rows));
}

void record_unfused(Recorder& r, const BufferUse& step, const std::string& label, const MoeShape& m, const ExpertWeights& w, const Vector& norm, const Stream& s) {
  RowsOf one{step, 1};
  Slot x = r.acts("x", m.H), router = r.floats("router", m.E + 1), logits = router.part(0, m.E * 4), shared_logit = router.part(m.E * 4, 4);
  Slot ids = r.words("expert_ids", m.k), route = r.floats("expert_route", m.k);
  Slot gate = r.floats("expert_gate", uint64_t(m.k) * m.I), up = r.floats("expert_up", uint64_t(m.k) * m.I), act = r.acts("expert_act", uint64_t(m.k) * m.I);
  Slot y = r.floats("expert_y", uint64_t(m.k) * m.H);
  Slot sgate = r.floats("shared_gate", m.S), sup = r.floats("shared_up", m.S), sact = r.acts("shared_act", m.S), sy = r.floats("shared_y", m.H);
  residual_norm_rows(r, one, label, mixer_out(r, m.H), s.h, norm, m.eps, x);
  gemv(r, label + ".gate", x, router, {{&w.router, 0}, {&w.shared_router, m.E}});
  topk(r, one, label, m, logits, ids, route);
  expert_gemv(r, label + ".experts.gate", m, w.gate, ids, x, gate, false);
  expert_gemv(r, label + ".experts.up", m, w.up, ids, x, up, false);
  swiglu_rows(r, one, label + ".experts.swiglu", gate, up, act, m.I, m.k);
  expert_gemv(r, label + ".experts.down", m, w.down, ids, act, y, true);
  gemv(r, label + ".shared_expert.gate_proj", x, sgate, {{&w.shared_gate}});
  gemv(r, label + ".shared_expert.up_proj", x, sup, {{&w.shared_up}});
  swiglu_rows(r, one, label + ".shared_expert.swiglu", sgate, sup, sact, m.S);
  gemv(r, label + ".shared_expert.down_proj", sact, sy, {{&w.shared_down}});
  combine(r, one, label, m, {}, route, y, sy, shared_logit, s.h);  // no slots: y is already in the order of ids
}

}  // namespace

void moe_step(Recorder& r, const BufferUse& step, const std::string& label, const MoeShape& m, const ExpertWeights& w, const Vector& norm, const Stream& s) {
  if (r.policy.fused)
    record_fused(r, label, m, w, norm, s);
  else
    record_unfused(r, step, label, m, w, norm, s);
}

void moe_rows(Recorder& r, const RowsOf& t, const std::string& label, const MoeShape& m, const ExpertWeights& weights, const Slot& x, const Slot& h) {
  ExpertWeights w = weights;
  w.gate = product_weight(r, label + ".experts.gate", weights.gate, "gate.");
  w.up = product_weight(r, label + ".experts.up", weights.up, "up.");
  w.down = product_weight(r, label + ".experts.down", weights.down, "down.");
  uint64_t T = t.rows, routed = T * m.k;
  Slot logits = r.floats("router", T * m.E), shared_logit = r.floats("shared_router", T);
  Slot ids = r.words("expert_ids", routed), route = r.floats("expert_route", routed);
  Slot offsets = r.words("expert_offsets", m.E + 1), rows = r.words("expert_rows", routed), slots = r.words("expert_slots", routed);
  Slot act = r.acts("expert_act", routed * m.I), y = r.floats("expert_y", routed * m.H);
  Slot sact = r.acts("shared_act", T * m.S), sy = r.floats("shared_y", T * m.H);

  gemm(r, t, label + ".gate", x, logits, w.router);
  r.program.last().traces[0].name = label + ".gate.logits";
  gemm(r, t, label + ".shared_expert_gate", x, shared_logit, w.shared_router);
  topk(r, t, label, m, logits, ids, route);
  TileMap map{};
  if (r.policy.traits.tile_map)
    map = map_tiles(r, t, label, m, ids, offsets, rows, slots);
  else
    group(r, t, label, m, ids, offsets, rows, slots);

  if (r.policy.fused) {
    std::vector<BufferUse> uses{offsets.read(), rows.read(), x.read(), act.write()};
    push_weight(uses, w.gate);
    push_weight(uses, w.up);
    Dispatch d = make_dispatch("moe_gate_up_rows", label + ".experts.gate_up", rows_args(m, w.gate, w.up), uses, uint64_t(m.E) * blocks(m.I, 64));
    d.format = w.gate.format_name();
    d.reason = r.policy.reason;
    count_experts(d, {&w.gate, &w.up}, uint32_t(routed));
    use_tiles(d, map, map.gate_up_grid);
    r.program.record(std::move(d));
    gate_up_rows(r, t, label + ".shared_expert.gate_up", x, sact, w.shared_gate, w.shared_up);
  } else {
    Slot gate = r.floats("expert_gate", routed * m.I), up = r.floats("expert_up", routed * m.I);
    for (auto [weight, out, name] : {std::tuple{&w.gate, gate, "gate"}, std::tuple{&w.up, up, "up"}}) {
      std::vector<BufferUse> uses{offsets.read(), rows.read(), x.read(), out.write()};
      push_weight(uses, *weight);
      Dispatch d = make_dispatch("moe_gemm_rows", label + ".experts." + name, rows_args(m, *weight, *weight), uses, uint64_t(m.E) * blocks(m.I, 64));
      count_experts(d, {weight}, uint32_t(routed));
      use_tiles(d, map, map.gate_up_grid);
      r.program.record(std::move(d));
    }
    swiglu_rows(r, t, label + ".experts.swiglu", gate, up, act, m.I, m.k);
    Slot sgate = r.floats("shared_gate", T * m.S), sup = r.floats("shared_up", T * m.S);
    gemm(r, t, label + ".shared_expert.gate_proj", x, sgate, w.shared_gate);
    gemm(r, t, label + ".shared_expert.up_proj", x, sup, w.shared_up);
    swiglu_rows(r, t, label + ".shared_expert.swiglu", sgate, sup, sact, m.S);
  }

  LilyMoeRowsArgs a = rows_args(m, w.down, w.down);
  a.by_slot = 1;
  std::vector<BufferUse> uses{offsets.read(), rows.read(), act.read(), y.write()};
  push_weight(uses, w.down);
  Dispatch d = make_dispatch("moe_gemm_rows", label + ".experts.down", a, uses, uint64_t(m.E) * blocks(m.H, 64));
  d.format = w.down.format_name();
  count_experts(d, {&w.down}, uint32_t(routed));
  use_tiles(d, map, map.down_grid);
  r.program.record(std::move(d));
  gemm(r, t, label + ".shared_expert.down_proj", sact, sy, w.shared_down);
  combine(r, t, label, m, slots, route, y, sy, shared_logit, h);
}

}  // namespace lily
