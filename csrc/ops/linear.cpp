#include "ops/linear.hpp"

#include <algorithm>

namespace lily {
namespace {

constexpr uint32_t kTile = 64;  // outputs of one threadgroup of the matrix kernels

uint64_t matrix_groups(const RowsOf& t, const Linear& w) { return blocks(t.rows, LILY_GEMM_ROWS) * blocks(w.rows, kTile); }

bool same(const LilyFormat& a, const LilyFormat& b) { return a.kind == b.kind && a.bits == b.bits && a.group == b.group; }

LilyGemmArgs gemm_args(const Linear& w, uint32_t ldy, uint32_t out, bool round) {
  LilyGemmArgs a{};
  a.fmt = w.format;
  a.K = w.cols;
  a.N = w.rows;
  a.ldy = ldy ? ldy : w.rows;
  a.out = out;
  a.round = round;
  a.rows_per_token = 1;
  return a;
}

// The segments of one format, which one dispatch takes.
struct Joined {
  LilyGemvArgs args{};
  std::string format;
  Slot y;  // from the first of them to the last; segments of other formats between them are not touched
  uint64_t covered = 0, groups = 0;
  std::vector<BufferUse> weights;
};

std::vector<Joined> join_by_format(const Slot& y, const std::vector<Segment>& segments) {
  std::vector<Joined> found;
  std::vector<bool> taken(segments.size(), false);
  for (size_t i = 0; i < segments.size(); i++) {
    if (taken[i]) continue;
    const Linear& first = *segments[i].weight;
    Joined j;
    j.args.fmt = first.format;
    j.args.K = first.cols;
    j.format = first.format_name();
    uint64_t begin = ~0ull, end = 0;
    for (size_t k = i; k < segments.size(); k++) {
      const Linear& w = *segments[k].weight;
      if (taken[k] || !same(w.format, first.format)) continue;
      taken[k] = true;
      j.args.seg[j.args.n_segments++] = {w.rows, uint32_t(segments[k].out), segments[k].round};
      j.groups += blocks(w.rows, LILY_ROW_BLOCK);
      j.covered += uint64_t(w.rows) * 4;
      push_weight(j.weights, w);
      begin = std::min<uint64_t>(begin, segments[k].out * 4);
      end = std::max<uint64_t>(end, (segments[k].out + w.rows) * 4);
    }
    for (uint32_t k = 0; k < j.args.n_segments; k++) j.args.seg[k].out -= uint32_t(begin / 4);
    j.y = y.part(begin, end - begin);
    found.push_back(std::move(j));
  }
  return found;
}

void record_joined(Recorder& r, const char* kernel, const std::string& label, const Joined& j, std::vector<BufferUse> uses, const std::string& reason) {
  uses.push_back(j.y.write());
  uses.insert(uses.end(), j.weights.begin(), j.weights.end());
  Dispatch d = make_dispatch(kernel, label, j.args, uses, j.groups);
  d.bytes_written = j.covered;
  d.format = j.format;
  d.reason = reason;
  r.program.record(std::move(d));
}

}  // namespace

void gemv(Recorder& r, const std::string& label, const Slot& x, const Slot& y, const std::vector<Segment>& segments) {
  for (const Joined& j : join_by_format(y, segments)) record_joined(r, "gemv", label, j, {x.read()}, "");
}

void gemv_norm(Recorder& r, const std::string& label, const Stream& s, const Vector& norm, float eps, const Slot& y, const std::vector<Segment>& segments) {
  for (Joined& j : join_by_format(y, segments)) {
    j.args.eps = eps;
    record_joined(r, "gemv_norm", label, j, {s.h.read(), s.ssq.read(), norm.read()}, r.policy.reason);
  }
}

void gemv_residual(Recorder& r, const std::string& label, const Slot& x, const Stream& s, const Linear& w) {
  LilyGemvArgs a{};
  a.fmt = w.format;
  a.K = w.cols;
  a.n_segments = 1;
  a.seg[0] = {w.rows, 0, 0};
  std::vector<BufferUse> uses{x.read(), s.h.update(), s.ssq.write()};
  push_weight(uses, w);
  Dispatch d = make_dispatch("gemv_residual", label, a, uses, blocks(w.rows, LILY_ROW_BLOCK));
  d.format = w.format_name();
  d.reason = r.policy.reason;
  r.program.record(std::move(d));
}

void gate_up_norm(Recorder& r, const std::string& label, const Stream& s, const Vector& norm, float eps, const Slot& act, const Linear& gate, const Linear& up) {
  LilyGateUpArgs a{};
  a.gate = gate.format;
  a.up = up.format;
  a.K = gate.cols;
  a.I = gate.rows;
  a.eps = eps;
  std::vector<BufferUse> uses{s.h.read(), s.ssq.read(), norm.read(), act.write()};
  push_weight(uses, gate);
  push_weight(uses, up);
  Dispatch d = make_dispatch("gate_up_norm", label, a, uses, blocks(gate.rows, LILY_ROW_BLOCK));
  d.format = gate.format_name();
  d.reason = r.policy.reason;
  r.program.record(std::move(d));
}

Linear product_weight(Recorder& r, const std::string& label, const Linear& w, const char* place) {
  if (!r.policy.traits.expand || !w.affine()) return w;
  LilyGemmArgs a{};
  a.fmt = w.format;
  a.K = w.cols;
  a.N = uint32_t(w.span_rows());
  Slot copy = r.acts(std::string("expanded.") + place + std::to_string(a.N) + "x" + std::to_string(a.K), uint64_t(a.N) * a.K);
  std::vector<BufferUse> uses;
  push_weight(uses, w);
  uses.push_back(copy.write());
  r.program.record(make_dispatch("expand_rows", label + ".expand", a, uses, a.N));
  Linear plain = w;
  plain.format = {r.storage == DType::f32 ? LILY_W_F32 : LILY_W_BF16, 0, 0};
  plain.codes = copy.symbol;
  plain.offset = copy.offset;
  plain.scales = plain.biases = kNoSymbol;
  return plain;
}

void gemm(Recorder& r, const RowsOf& t, const std::string& label, const Slot& x, const Slot& y, const Linear& weight, uint32_t ldy, uint32_t out, bool round) {
  const Linear w = product_weight(r, label, weight, "one.");
  std::vector<BufferUse> uses{t.step, x.read(), y.write()};
  push_weight(uses, w);
  Dispatch d = make_dispatch("gemm", label, gemm_args(w, ldy, out, round), uses, matrix_groups(t, w));
  d.format = w.format_name();
  traced(d, label + ".out", 2);
  r.program.record(std::move(d));
}

void gemm_residual(Recorder& r, const RowsOf& t, const std::string& label, const Slot& x, const Slot& h, const Linear& weight) {
  const Linear w = product_weight(r, label, weight, "one.");
  std::vector<BufferUse> uses{t.step, x.read(), h.update()};
  push_weight(uses, w);
  Dispatch d = make_dispatch("gemm_residual", label, gemm_args(w, 0, 0, false), uses, matrix_groups(t, w));
  d.format = w.format_name();
  d.reason = r.policy.reason;
  r.program.record(std::move(d));
}

void gate_up_rows(Recorder& r, const RowsOf& t, const std::string& label, const Slot& x, const Slot& act, const Linear& gate_weight, const Linear& up_weight) {
  const Linear gate = product_weight(r, label + ".gate", gate_weight, "gate."), up = product_weight(r, label + ".up", up_weight, "up.");
  LilyGemmArgs a = gemm_args(gate, 0, 0, false);
  a.up = up.format;
  std::vector<BufferUse> uses{t.step, x.read(), act.write()};
  push_weight(uses, gate);
  push_weight(uses, up);
  Dispatch d = make_dispatch("gate_up_rows", label, a, uses, matrix_groups(t, gate));
  d.format = gate.format_name();
  d.reason = r.policy.reason;
  r.program.record(std::move(d));
}

void swiglu_rows(Recorder& r, const RowsOf& t, const std::string& label, const Slot& gate, const Slot& up, const Slot& act, uint32_t width, uint32_t rows_per_token) {
  LilyGemmArgs a{};
  a.N = width;
  a.rows_per_token = rows_per_token;
  r.program.record(make_dispatch("swiglu_rows", label, a, {t.step, gate.read(), up.read(), act.write()}, t.rows));
}

}  // namespace lily
