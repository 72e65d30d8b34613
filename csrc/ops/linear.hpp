// Linear layers: matrix-vector forms for decode, matrix-matrix forms for prefill.
#pragma once
#include "ops/recorder.hpp"

namespace lily {

struct Segment {
  const Linear* weight;
  uint64_t out = 0;  // element offset in y
  bool round = false;  // to the activation storage, kept as f32
};

// The residual stream of a decode step: h f32[H] and its partial sums of squares f32[H/16].
struct Stream {
  Slot h, ssq;
};

// y_s = W_s x for all segments; one dispatch per weight format.
void gemv(Recorder& r, const std::string& label, const Slot& x, const Slot& y, const std::vector<Segment>& segments);
// y_s = W_s rmsnorm(h), cut alike; all in one stage.
void gemv_norm(Recorder& r, const std::string& label, const Stream& s, const Vector& norm, float eps, const Slot& y, const std::vector<Segment>& segments);
// h += W x, with the partial sums of squares of the new h.
void gemv_residual(Recorder& r, const std::string& label, const Slot& x, const Stream& s, const Linear& w);
// a = silu(G rmsnorm(h)) * (U rmsnorm(h))
void gate_up_norm(Recorder& r, const std::string& label, const Stream& s, const Vector& norm, float eps, const Slot& a, const Linear& gate, const Linear& up);

// Prefill: rows of a chunk, `rows` the program's row bucket, live rows in the step record.
struct RowsOf {
  BufferUse step;
  uint32_t rows;
};
// The weight that a product of prefill reads: itself, or where the device asks for the comparison, a dequantised copy in the workspace.
// Copies of one shape share memory unless their places differ.
Linear product_weight(Recorder& r, const std::string& label, const Linear& w, const char* place);
void gemm(Recorder& r, const RowsOf& t, const std::string& label, const Slot& x, const Slot& y, const Linear& w, uint32_t ldy = 0, uint32_t out = 0, bool round = false);
void gemm_residual(Recorder& r, const RowsOf& t, const std::string& label, const Slot& x, const Slot& h, const Linear& w);
void gate_up_rows(Recorder& r, const RowsOf& t, const std::string& label, const Slot& x, const Slot& a, const Linear& gate, const Linear& up);
void swiglu_rows(Recorder& r, const RowsOf& t, const std::string& label, const Slot& gate, const Slot& up, const Slot& a, uint32_t width, uint32_t rows_per_token = 1);

}  // namespace lily
