#include "ops/norm.hpp"

namespace lily {

void embed_step(Recorder& r, const BufferUse& step, const Linear& table, const Stream& s) {
  LilyEmbedArgs a{table.format, table.cols, table.rows};
  std::vector<BufferUse> uses{step};
  push_weight(uses, table);
  uses.push_back(s.h.write());
  uses.push_back(s.ssq.write());
  Dispatch d = make_dispatch("embed_step", "embed_tokens", a, uses, 1);
  d.format = table.format_name();
  d.bytes_read = table.row_bytes() + table.row_groups() * 4;  // one row of the table
  traced(d, "embed_tokens.out", 4);
  r.program.record(std::move(d));
}

void embed_rows(Recorder& r, const RowsOf& t, const BufferUse& ids, const Linear& table, const Slot& h) {
  LilyEmbedArgs a{table.format, table.cols, table.rows};
  std::vector<BufferUse> uses{t.step, ids};
  push_weight(uses, table);
  uses.push_back(h.write());
  Dispatch d = make_dispatch("embed_rows", "embed_tokens", a, uses, t.rows);
  d.format = table.format_name();
  d.bytes_read = t.rows * (table.row_bytes() + table.row_groups() * 4);
  traced(d, "embed_tokens.out", 5);
  r.program.record(std::move(d));
}

void rmsnorm_rows(Recorder& r, const RowsOf& t, const std::string& label, const Slot& h, const Vector& weight, float eps, const Slot& x) {
  LilyNormArgs a{weight.size, eps, 0};
  Dispatch d = make_dispatch("rmsnorm_rows", label, a, {t.step, h.read(), weight.read(), x.write()}, t.rows);
  traced(d, label + ".out", 3, r.storage);
  r.program.record(std::move(d));
}

void norm_final(Recorder& r, const Stream& s, const Vector& weight, float eps, const Slot& x, const BufferUse& hidden) {
  LilyNormArgs a{weight.size, eps, 0};
  r.program.record(make_dispatch("norm_final", "norm", a, {s.h.read(), s.ssq.read(), weight.read(), x.write(), hidden}, 1));
}

Slot mixer_out(Recorder& r, uint32_t H) { return r.floats("mixer_y", H); }

void residual_norm_rows(Recorder& r, const RowsOf& t, const std::string& label, const Slot& y, const Slot& h, const Vector& weight, float eps, const Slot& x) {
  LilyNormArgs a{weight.size, eps, 0};
  r.program.record(make_dispatch("residual_norm_rows", label, a, {t.step, y.read(), h.update(), weight.read(), x.write()}, t.rows));
}

void residual_rows(Recorder& r, const RowsOf& t, const std::string& label, const Slot& y, const Slot& h, uint32_t H) {
  r.program.record(make_dispatch("residual_rows", label, LilyNormArgs{H, 0, 0}, {t.step, y.read(), h.update()}, t.rows));
}

void take_rows(Recorder& r, const RowsOf& t, const Slot& h, uint32_t H, const BufferUse& hidden, const std::vector<BufferUse>& snapshots, const BufferUse& all) {
  LilyNormArgs a{H, 0, all.symbol != kNoSymbol};
  std::vector<BufferUse> uses{t.step, h.read(), hidden};
  uses.insert(uses.end(), snapshots.begin(), snapshots.end());
  uses.push_back(all);
  r.program.record(make_dispatch("take_rows", "hidden", a, uses, t.rows));
}

}  // namespace lily
