// Gated DeltaNet: convolution, gates, the recurrence and its gated norm.
#pragma once
#include "ops/linear.hpp"

namespace lily {

struct GdnShape {
  uint32_t H, Nk, Nv, Dk, Dv;
  float eps;
  uint32_t channels() const { return 2 * Nk * Dk + Nv * Dv; }
  uint32_t values() const { return Nv * Dv; }
};

struct GdnWeights {
  Linear qkv, z, b, a, out;
  Vector conv, A, dt_bias, norm;  // conv f32[4, C]
};

// Where a layer's part of a state value lies.
struct GdnState {
  BufferUse conv_in, s_in, conv_out, s_out;
  std::vector<BufferUse> conv_snapshots, s_snapshots;  // LILY_MAX_SNAPSHOTS each, or none
};

// h += GatedDeltaNet(rmsnorm(h)) in 3 dispatches and 3 stages; the twin leaves what is to be added in mixer_out().
void gdn_step(Recorder& r, const BufferUse& step, const std::string& label, const GdnShape& shape, const GdnWeights& w, const Vector& norm, const GdnState& state, const Stream& s);
void gdn_rows(Recorder& r, const RowsOf& t, const std::string& label, const GdnShape& shape, const GdnWeights& w, const GdnState& state, const Slot& x, const Slot& h);

}  // namespace lily
