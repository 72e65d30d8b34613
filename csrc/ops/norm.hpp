// Embedding, norms and the residual stream.
#pragma once
#include "ops/linear.hpp"

namespace lily {

void embed_step(Recorder& r, const BufferUse& step, const Linear& table, const Stream& s);
void embed_rows(Recorder& r, const RowsOf& t, const BufferUse& ids, const Linear& table, const Slot& h);
void rmsnorm_rows(Recorder& r, const RowsOf& t, const std::string& label, const Slot& h, const Vector& weight, float eps, const Slot& x);
// x = rmsnorm(h); `hidden` gets a copy of h, the state's last row before the head.
void norm_final(Recorder& r, const Stream& s, const Vector& weight, float eps, const Slot& x, const BufferUse& hidden);
// The twin of a layer's first half leaves its output here, and that of its second half begins with residual_norm_rows.
Slot mixer_out(Recorder& r, uint32_t H);
// h += y; x = rmsnorm(h)
void residual_norm_rows(Recorder& r, const RowsOf& t, const std::string& label, const Slot& y, const Slot& h, const Vector& weight, float eps, const Slot& x);
void residual_rows(Recorder& r, const RowsOf& t, const std::string& label, const Slot& y, const Slot& h, uint32_t H);
// Copies the last live row to `hidden`, snapshot rows to theirs, and all rows to `all` when it is bound.
void take_rows(Recorder& r, const RowsOf& t, const Slot& h, uint32_t H, const BufferUse& hidden, const std::vector<BufferUse>& snapshots, const BufferUse& all);

}  // namespace lily
