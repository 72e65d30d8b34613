#include "ops/gdn.hpp"

#include "ops/norm.hpp"

namespace lily {
namespace {

LilyGdnArgs gdn_args(const GdnShape& g) {
  LilyGdnArgs a{};
  a.Nk = g.Nk;
  a.Nv = g.Nv;
  a.Dk = g.Dk;
  a.Dv = g.Dv;
  a.ld_qkv = g.channels();
  a.ld_z = g.values();
  a.ld_ba = g.Nv;
  a.eps = g.eps;
  return a;
}

void push_snapshots(std::vector<BufferUse>& uses, const std::vector<BufferUse>& snapshots) {
  for (size_t i = 0; i < LILY_MAX_SNAPSHOTS; i++) uses.push_back(i < snapshots.size() ? snapshots[i] : BufferUse{});
}

// From the four projections of T rows to the gated, normed heads: prefill, and the twin of the fused decode step.
void record_chain(Recorder& r, const RowsOf& t, const std::string& label, const GdnShape& g, const GdnWeights& w, const GdnState& state, const Slot& qkv, const Slot& z,
                  const Slot& b, const Slot& a, const Slot& x) {
  LilyGdnArgs args = gdn_args(g);
  uint64_t T = t.rows;
  Slot y = r.floats("conv_out", T * g.channels()), gates = r.floats("gates", T * g.Nv * 2), o = r.floats("scan_out", T * g.values());
  std::vector<BufferUse> uses{t.step, qkv.read(), w.conv.read(), state.conv_in, state.conv_out, y.write()};
  push_snapshots(uses, state.conv_snapshots);
  r.program.record(make_dispatch("conv_rows", label + ".conv1d", args, uses, blocks(T, LILY_CONV_ROWS)));
  r.program.record(make_dispatch("gdn_prepare_rows", label + ".prepare", args, {t.step, y.update(), b.read(), a.read(), w.A.read(), w.dt_bias.read(), gates.write()}, t.rows));
  BufferUse s_out = state.s_out;
  s_out.access = Access::read_write;  // a scan in blocks reads what it wrote
  uses = {t.step, y.read(), gates.read(), state.s_in, s_out, o.write()};
  push_snapshots(uses, state.s_snapshots);
  r.program.record(make_dispatch("gdn_scan", label + ".scan", args, uses, uint64_t(g.Nv) * blocks(g.Dv, 64)));
  Dispatch d = make_dispatch("gated_norm_rows", label + ".norm", args, {t.step, o.read(), z.read(), w.norm.read(), x.write()}, t.rows);
  traced(d, label + ".norm.out", 4, r.storage);
  r.program.record(std::move(d));
}

}  // namespace

void gdn_step(Recorder& r, const BufferUse& step, const std::string& label, const GdnShape& g, const GdnWeights& w, const Vector& norm, const GdnState& state, const Stream& s) {
  uint64_t C = g.channels(), V = g.values();
  Slot heads = r.acts("heads", V), proj = r.floats("proj", C + V + 2 * g.Nv);
  const std::vector<Segment> projections{{&w.qkv, 0, true}, {&w.z, C}, {&w.b, C + V}, {&w.a, C + V + g.Nv}};
  if (r.policy.fused) {
    gemv_norm(r, label + ".in_proj", s, norm, g.eps, proj, projections);
    Dispatch d = make_dispatch("gdn_step", label + ".step", gdn_args(g),
                               {proj.read(), w.conv.read(), w.A.read(), w.dt_bias.read(), w.norm.read(), state.conv_in, state.s_in, state.conv_out, state.s_out, heads.write()}, g.Nv);
    d.reason = r.policy.reason;
    r.program.record(std::move(d));
    gemv_residual(r, label + ".out_proj", heads, s, w.out);
    return;
  }
  RowsOf one{step, 1};
  Slot x = r.acts("x", g.H);
  rmsnorm_rows(r, one, label + ".input_layernorm", s.h, norm, g.eps, x);
  gemv(r, label + ".in_proj", x, proj, projections);
  const uint64_t heads_bytes = g.Nv * 4ull;
  record_chain(r, one, label, g, w, state, proj.part(0, C * 4), proj.part(C * 4, V * 4), proj.part((C + V) * 4, heads_bytes), proj.part((C + V) * 4 + heads_bytes, heads_bytes), heads);
  gemv(r, label + ".out_proj", heads, mixer_out(r, g.H), {{&w.out}});
}

void gdn_rows(Recorder& r, const RowsOf& t, const std::string& label, const GdnShape& g, const GdnWeights& w, const GdnState& state, const Slot& x, const Slot& h) {
  uint64_t T = t.rows;
  Slot qkv = r.floats("qkv", T * g.channels()), z = r.floats("z", T * g.values()), b = r.floats("b", T * g.Nv), a = r.floats("a", T * g.Nv);
  Slot heads = r.acts("heads", T * g.values());
  gemm(r, t, label + ".in_proj_qkv", x, qkv, w.qkv, 0, 0, true);
  gemm(r, t, label + ".in_proj_z", x, z, w.z);
  gemm(r, t, label + ".in_proj_b", x, b, w.b);
  gemm(r, t, label + ".in_proj_a", x, a, w.a);
  record_chain(r, t, label, g, w, state, qkv, z, b, a, heads);
  if (r.policy.fused) {
    gemm_residual(r, t, label + ".out_proj", heads, h, w.out);
  } else {
    Slot y = r.floats("mixer_y", T * g.H);
    gemm(r, t, label + ".out_proj", heads, y, w.out);
    residual_rows(r, t, label + ".residual", y, h, g.H);
  }
}

}  // namespace lily
