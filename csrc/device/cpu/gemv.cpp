// Matrix-vector products of decode. A threadgroup is 16 output rows; the order of a row's sums is in row_dot.hpp.
// Bytes moved: the weight once (K*bits/8 + 4*K/group a row), x once per range.
#include "device/cpu/kernel.hpp"
#include "device/cpu/row_dot.hpp"

namespace lily::cpu::LILY_CPU_NS {

// Threadgroups [begin, end) of all segments, whose weights begin at `weights`.
template <class Act> static void segment_rows(const LilyGemvArgs& a, void* const* weights, const Input& in, uint32_t begin, uint32_t end, float* out) {
  uint32_t base = 0;  // first threadgroup of the segment
  for (uint32_t i = 0; i < a.n_segments; i++) {
    const LilySegment& s = a.seg[i];
    const uint32_t groups = (s.rows + LILY_ROW_BLOCK - 1) / LILY_ROW_BLOCK;
    const Weight w = make_weight(a.fmt, a.K, weights + 3 * i);
    for (uint32_t g = begin > base ? begin : base; g < end && g < base + groups; g++) {
      uint32_t row = (g - base) * LILY_ROW_BLOCK, n = smaller(s.rows - row, LILY_ROW_BLOCK);
      float* y = out + s.out + row;
      dot_rows(w, in, row, n, y);
      if (s.round)
        for (uint32_t j = 0; j < n; j++) y[j] = round_act<Act>(y[j]);
    }
    base += groups;
  }
}

// x act[K], y f32, then W per segment; y_s = W_s x, rounded when the segment says so. grid: rows/16 of all segments
template <class Act> static void gemv(const KernelCall& c, uint32_t begin, uint32_t end) {
  const auto& a = args<LilyGemvArgs>(c);
  Weight w = make_weight(a.fmt, a.K, c.buffers + 2);
  prefetch_first(w, begin * LILY_ROW_BLOCK);
  float* natural = LILY_STACK_FLOATS(vector_floats(a.K));
  expand(buffer<const Act>(c, 0), a.K, natural);
  Input in = arrange<Act>(w, natural, LILY_STACK_FLOATS(arranged_floats(w)));
  do {
    segment_rows<Act>(a, c.buffers + 2, in, begin, end, buffer<float>(c, 1));
  } while (next_range(c, begin, end));
}

// h f32[K], ssq f32[K/16], weight f32[K], y f32, then W per segment; x = round(h * r * weight), y_s = W_s x. grid: rows/16 of all segments
template <class Act> static void gemv_norm(const KernelCall& c, uint32_t begin, uint32_t end) {
  const auto& a = args<LilyGemvArgs>(c);
  Weight w = make_weight(a.fmt, a.K, c.buffers + 4);
  for (uint32_t i = 0, base = 0; i < a.n_segments; i++) {
    const uint32_t groups = (a.seg[i].rows + LILY_ROW_BLOCK - 1) / LILY_ROW_BLOCK;
    if (begin >= base && begin < base + groups) prefetch_first(make_weight(a.fmt, a.K, c.buffers + 4 + 3 * i), (begin - base) * LILY_ROW_BLOCK);
    base += groups;
  }
  float* natural = LILY_STACK_FLOATS(vector_floats(a.K));
  expand_normed<Act>(buffer<float>(c, 0), buffer<float>(c, 1), buffer<float>(c, 2), a.K, a.eps, natural);
  Input in = arrange<Act>(w, natural, LILY_STACK_FLOATS(arranged_floats(w)));
  do {
    segment_rows<Act>(a, c.buffers + 4, in, begin, end, buffer<float>(c, 3));
  } while (next_range(c, begin, end));
}

// x act[K], h f32[N], ssq f32[N/16], W [N, K]; h += W x, ssq = sums of 16 squares of the new h. grid: N/16
template <class Act> static void gemv_residual(const KernelCall& c, uint32_t begin, uint32_t end) {
  const auto& a = args<LilyGemvArgs>(c);
  Weight w = make_weight(a.fmt, a.K, c.buffers + 3);
  prefetch_first(w, begin * LILY_ROW_BLOCK);
  float* natural = LILY_STACK_FLOATS(vector_floats(a.K));
  expand(buffer<const Act>(c, 0), a.K, natural);
  Input in = arrange<Act>(w, natural, LILY_STACK_FLOATS(arranged_floats(w)));
  do
    for (uint32_t g = begin; g < end; g++) {
      uint32_t row = g * LILY_ROW_BLOCK, n = smaller(a.seg[0].rows - row, LILY_ROW_BLOCK);
      float* h = buffer<float>(c, 1) + row;
      float y[16] = {};
      dot_rows(w, in, row, n, y);
      store(y, add(load_n(h, n), load(y)));
      store_n(h, load(y), n);
      buffer<float>(c, 2)[g] = ssq_block(y);
    }
  while (next_range(c, begin, end));
}

// h f32[K], ssq, weight f32[K], a act[I], gate [I, K], up [I, K]; a = round(silu(G x) * (U x)). grid: I/16
template <class Act> static void gate_up_norm(const KernelCall& c, uint32_t begin, uint32_t end) {
  const auto& a = args<LilyGateUpArgs>(c);
  Weight gate = make_weight(a.gate, a.K, c.buffers + 4), up = make_weight(a.up, a.K, c.buffers + 7);
  prefetch_first(gate, begin * LILY_ROW_BLOCK);
  prefetch_first(up, begin * LILY_ROW_BLOCK);
  float* natural = LILY_STACK_FLOATS(vector_floats(a.K));
  expand_normed<Act>(buffer<float>(c, 0), buffer<float>(c, 1), buffer<float>(c, 2), a.K, a.eps, natural);
  Input gate_in = arrange<Act>(gate, natural, LILY_STACK_FLOATS(arranged_floats(gate)));
  Input up_in = same_format(a.gate, a.up) ? gate_in : arrange<Act>(up, natural, LILY_STACK_FLOATS(arranged_floats(up)));
  do
    for (uint32_t g = begin; g < end; g++) {
      uint32_t row = g * LILY_ROW_BLOCK, n = smaller(a.I - row, LILY_ROW_BLOCK);
      float gx[16] = {}, ux[16] = {};
      dot_rows(gate, gate_in, row, n, gx);
      dot_rows(up, up_in, row, n, ux);
      store_n(buffer<Act>(c, 3) + row, mul(silu(load(gx)), load(ux)), n);
    }
  while (next_range(c, begin, end));
}

}  // namespace lily::cpu::LILY_CPU_NS

LILY_KERNELS(gemv, {"gemv", gemv<Bf16>, gemv<F32>}, {"gemv_norm", gemv_norm<Bf16>, gemv_norm<F32>}, {"gemv_residual", gemv_residual<Bf16>, gemv_residual<F32>},
             {"gate_up_norm", gate_up_norm<Bf16>, gate_up_norm<F32>})
