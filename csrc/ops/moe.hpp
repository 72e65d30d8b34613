// Mixture of experts: routing, the chosen experts, the shared expert.
#pragma once
#include "ops/linear.hpp"

namespace lily {

struct ExpertWeights {
  Linear router, shared_router;            // [E, H], [1, H]
  Linear gate, up, down;                   // stacked experts
  Linear shared_gate, shared_up, shared_down;
};

struct MoeShape {
  uint32_t H, E, k, I, S;
  float eps;
};

// h += MoE(rmsnorm(h)) in 4 dispatches and 3 stages; the twin adds mixer_out() to h first.
void moe_step(Recorder& r, const BufferUse& step, const std::string& label, const MoeShape& shape, const ExpertWeights& w, const Vector& norm, const Stream& s);
// The same for the rows of a chunk; x is the normed input.
void moe_rows(Recorder& r, const RowsOf& t, const std::string& label, const MoeShape& shape, const ExpertWeights& w, const Slot& x, const Slot& h);

}  // namespace lily
