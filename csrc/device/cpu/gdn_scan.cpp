// gdn_scan: the recurrence of Gated DeltaNet over the rows of a chunk. Per value head and token:
//   u = S k, p = S q (old state, dk ascending); d = beta (v - g u); S = g S + d k^T; o = g p + d (k.q)
// step, y f32[T,C] (q and k normalised), gates f32[T,Nv,2] (g, beta), S_in f32[Nv,Dk,Dv] -> S_out, o f32[T,Nv*Dv], snapshots of S. grid: Nv * ceil(Dv/64)
// A threadgroup owns 64 columns of a head's state and keeps them in first-level cache for the whole chunk. Row dk of the next token's
// u and p is added up as soon as row dk is updated, so the state is read and written once per token, with the sums of the plain order.
#include "device/cpu/gdn.hpp"
#include "device/cpu/kernel.hpp"

namespace lily::cpu::LILY_CPU_NS {
namespace {

constexpr uint32_t kScanColumns = 64;

struct Scan {
  const LilyStep* step;
  const float *q, *k, *v, *gates;  // of this head in row 0
  const float* S_in;               // of this head
  float *S_out, *o;
  void* const* snapshots;
  uint64_t head_offset;  // of this head in a state
  uint32_t Dk, Dv, C, Nv;
};

template <int N> LILY_INLINE void write_state(const Scan& s, const float* S, float* out, uint32_t c) {
  for (uint32_t dk = 0; dk < s.Dk; dk++) store_columns<N>(out + dk * s.Dv + c, load_columns<N>(S + dk * 16 * N));
}

// Rows of a chunk lie pages apart, out of sight of the hardware prefetcher. q and k only as far as the second-level cache: the
// state fills most of the first.
template <int N> LILY_INLINE void prefetch_row(const Scan& s, uint32_t t, uint32_t c) {
  const uint64_t at = uint64_t(t) * s.C;
  for (uint32_t i = 0; i < s.Dk; i += 16) {
    __builtin_prefetch(s.k + at + i, 0, 2);
    __builtin_prefetch(s.q + at + i, 0, 2);
  }
  __builtin_prefetch(s.gates + uint64_t(t) * 2 * s.Nv);
  for (uint32_t i = 0; i < 16 * N; i += 16) {
    __builtin_prefetch(s.v + at + c + i);
    __builtin_prefetch(s.o + uint64_t(t) * s.Nv * s.Dv + c + i, 1);
  }
}

// Columns [c, c + 16 N) of one head, all rows.
template <int N> void scan_columns(const Scan& s, uint32_t c) {
  alignas(64) float S[kMaxHeadDim * 16 * N];
  const uint32_t Dk = s.Dk, rows = s.step->rows;
  Columns<N> u = zero_columns<N>(), p = u;
  for (uint32_t dk = 0; dk < Dk; dk++) {
    Columns<N> row = load_columns<N>(s.S_in + dk * s.Dv + c);
    store_columns<N>(S + dk * 16 * N, row);
    if (rows == 0) continue;
    u = fma_columns<N>(row, splat(s.k[dk]), u);
    p = fma_columns<N>(row, splat(s.q[dk]), p);
  }
  for (uint32_t t = 0; t < rows; t++) {
    const uint64_t at = uint64_t(t) * s.C;
    const float *k = s.k + at, *gate = s.gates + uint64_t(t) * 2 * s.Nv;
    const V g = splat(gate[0]);
    const Columns<N> d = delta_columns<N>(u, g, splat(gate[1]), load_columns<N>(s.v + at + c));
    const Columns<N> o = fma_columns<N>(d, splat(dot(k, s.q + at, Dk)), scaled<N>(p, g));
    store_columns<N>(s.o + uint64_t(t) * s.Nv * s.Dv + c, o);
    if (t + 1 < rows) {
      const float *next_k = k + s.C, *next_q = s.q + at + s.C;
      if (t + 2 < rows) prefetch_row<N>(s, t + 2, c);
      u = p = zero_columns<N>();
      for (uint32_t dk = 0; dk < Dk; dk++) {
        float* row = S + dk * 16 * N;
        const Columns<N> updated = fma_columns<N>(d, splat(k[dk]), scaled<N>(load_columns<N>(row), g));
        store_columns<N>(row, updated);
        u = fma_columns<N>(updated, splat(next_k[dk]), u);
        p = fma_columns<N>(updated, splat(next_q[dk]), p);
      }
    } else {
      for (uint32_t dk = 0; dk < Dk; dk++) {
        float* row = S + dk * 16 * N;
        store_columns<N>(row, fma_columns<N>(d, splat(k[dk]), scaled<N>(load_columns<N>(row), g)));
      }
    }
    for (uint32_t i = 0; i < s.step->n_snapshots && i < LILY_MAX_SNAPSHOTS; i++)
      if (s.step->snapshot_rows[i] == t && s.snapshots[i]) write_state<N>(s, S, static_cast<float*>(s.snapshots[i]) + s.head_offset, c);
  }
  write_state<N>(s, S, s.S_out, c);
}

}  // namespace

template <class Act> static void gdn_scan(const KernelCall& c, uint32_t begin, uint32_t end) {
  const auto& a = args<LilyGdnArgs>(c);
  const uint32_t Dk = a.Dk, Dv = a.Dv, keys = a.Nk * Dk, C = 2 * keys + a.Nv * Dv, blocks = (Dv + kScanColumns - 1) / kScanColumns;
  const float* y = buffer<float>(c, 1);
  for (uint32_t group = begin; group < end; group++) {
    const uint32_t n = group / blocks, key = n / (a.Nv / a.Nk);
    const uint64_t offset = uint64_t(n) * Dk * Dv;
    const Scan scan{.step = buffer<LilyStep>(c, 0), .q = y + key * Dk, .k = y + keys + key * Dk, .v = y + 2 * keys + n * Dv,
                    .gates = buffer<float>(c, 2) + 2 * n, .S_in = buffer<float>(c, 3) + offset, .S_out = buffer<float>(c, 4) + offset,
                    .o = buffer<float>(c, 5) + n * Dv, .snapshots = c.buffers + 6, .head_offset = offset, .Dk = Dk, .Dv = Dv, .C = C, .Nv = a.Nv};
    uint32_t column = group % blocks * kScanColumns;
    const uint32_t last = column + kScanColumns < Dv ? column + kScanColumns : Dv;
    for (; column + 16 * kStateColumns <= last; column += 16 * kStateColumns) scan_columns<kStateColumns>(scan, column);
    for (; column < last; column += 16) scan_columns<1>(scan, column);
  }
}

}  // namespace lily::cpu::LILY_CPU_NS

LILY_KERNELS(gdn_scan, {"gdn_scan", gdn_scan<Bf16>, gdn_scan<F32>})
