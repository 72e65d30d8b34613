// Mixture of experts in decode: the chosen experts of one token. Order of a row's sums in row_dot.hpp, of the experts' sum below.
// Expert tensors are stacks [E, rows, K]: row n of expert e is row e*stride + n.
#include "device/cpu/kernel.hpp"
#include "device/cpu/route.hpp"
#include "device/cpu/row_dot.hpp"

namespace lily::cpu::LILY_CPU_NS {

static uint32_t row_blocks(uint32_t rows) { return (rows + LILY_ROW_BLOCK - 1) / LILY_ROW_BLOCK; }

// h f32[K], ssq, weight f32[K], logits f32[E], ids u32[k], route f32[k], a act[k,I], gate and up stacks [E, I, K].
// a_j = round(silu(G_ej x) * (U_ej x)), x = round(h * r * weight). Threadgroup g: expert g / ceil(I/16); 0 writes ids and route.
// With `ninth` the shared expert comes last, ceil(S/16) threadgroups.
// Every range routes the token again: E logits are read faster than another stage costs.
template <class Act> static void moe_gate_up(const KernelCall& c, uint32_t begin, uint32_t end) {
  const auto& a = args<LilyMoeArgs>(c);
  uint32_t ids[LILY_MAX_EXPERTS_PER_TOKEN];
  float route[LILY_MAX_EXPERTS_PER_TOKEN];
  route_token(buffer<float>(c, 3), a.E, a.k, ids, route);
  Weight gate = make_weight(a.a, a.K, c.buffers + 7), up = make_weight(a.b, a.K, c.buffers + 10);
  const uint32_t blocks = row_blocks(a.I), routed = a.k * blocks, first = begin % blocks * LILY_ROW_BLOCK;
  if (begin < routed) {
    prefetch_first(gate, uint64_t(ids[begin / blocks]) * a.a_stride + first);
    prefetch_first(up, uint64_t(ids[begin / blocks]) * a.b_stride + first);
  }
  float* natural = LILY_STACK_FLOATS(vector_floats(a.K));
  expand_normed<Act>(buffer<float>(c, 0), buffer<float>(c, 1), buffer<float>(c, 2), a.K, a.eps, natural);
  Input gate_in = arrange<Act>(gate, natural, LILY_STACK_FLOATS(arranged_floats(gate)));
  Input up_in = same_format(a.a, a.b) ? gate_in : arrange<Act>(up, natural, LILY_STACK_FLOATS(arranged_floats(up)));
  do {
    if (begin == 0) {
      std::memcpy(c.buffers[4], ids, a.k * 4);
      std::memcpy(c.buffers[5], route, a.k * 4);
    }
    for (uint32_t g = begin; g < end && g < routed; g++) {
      uint32_t j = g / blocks, row = g % blocks * LILY_ROW_BLOCK, n = smaller(a.I - row, LILY_ROW_BLOCK);
      float gx[16] = {}, ux[16] = {};
      dot_rows(gate, gate_in, uint64_t(ids[j]) * a.a_stride + row, n, gx);
      dot_rows(up, up_in, uint64_t(ids[j]) * a.b_stride + row, n, ux);
      store_n(buffer<Act>(c, 6) + uint64_t(j) * a.I + row, mul(silu(load(gx)), load(ux)), n);
    }
    if (!a.ninth || end <= routed) continue;
    const Weight shared_gate = make_weight(a.a, a.K, c.buffers + 13), shared_up = make_weight(a.b, a.K, c.buffers + 16);
    for (uint32_t g = begin > routed ? begin : routed; g < end; g++) {
      uint32_t row = (g - routed) * LILY_ROW_BLOCK, n = smaller(a.S - row, LILY_ROW_BLOCK);
      float gx[16] = {}, ux[16] = {};
      dot_rows(shared_gate, gate_in, row, n, gx);
      dot_rows(shared_up, up_in, row, n, ux);
      store_n(buffer<Act>(c, 19) + row, mul(silu(load(gx)), load(ux)), n);
    }
  } while (next_range(c, begin, end));
}

// a act[k,I], ids, route, shared act[S], shared_logit f32[1], h f32[H], ssq f32[H/16], down stack [E, H, I], shared down [H, S].
// h += (sum over j of route_j * (D_ej a_j), j ascending) + sigmoid(shared_logit) * (D_s shared). grid: H/16
// Expert by expert over up to 64 threadgroups, so that each expert's rows are one long stream. Vectors made ready are kept for the next range if they are small.
template <class Act> static void moe_down(const KernelCall& c, uint32_t begin, uint32_t end) {
  constexpr uint32_t kBlocks = 64, kKeptFloats = 16 << 10;
  const auto& a = args<LilyMoeArgs>(c);
  const uint32_t* ids = buffer<uint32_t>(c, 1);
  const float* route = buffer<float>(c, 2);
  Weight down = make_weight(a.a, a.I, c.buffers + 7), shared = make_weight(a.b, a.S, c.buffers + 10);
  prefetch_first(down, uint64_t(ids[0]) * a.a_stride + begin * LILY_ROW_BLOCK);
  const float gate = sigmoid1(*buffer<float>(c, 4));
  float* natural = LILY_STACK_FLOATS(vector_floats(a.I > a.S ? a.I : a.S));
  const uint32_t of_down = arranged_floats(down), of_shared = arranged_floats(shared), floats = round_up(of_down > of_shared ? of_down : of_shared, 16);
  const bool keep = floats * (a.k + 1) <= kKeptFloats && down.fast(4) && shared.fast(4);  // an input of another format lies in `natural`
  float* scratch = LILY_STACK_FLOATS(keep ? floats * (a.k + 1) : floats);
  Input inputs[LILY_MAX_EXPERTS_PER_TOKEN + 1];
  uint32_t ready = 0;
  do
    for (uint32_t g0 = begin; g0 < end; g0 += kBlocks) {
      const uint32_t g1 = smaller(end, g0 + kBlocks);
      float sum[kBlocks * 16] = {};
      for (uint32_t j = 0; j <= a.k; j++) {
        const bool last = j == a.k;
        const Weight& w = last ? shared : down;
        if (j >= ready || !keep) {
          expand(last ? buffer<const Act>(c, 3) : buffer<const Act>(c, 0) + uint64_t(j) * a.I, w.K, natural);
          inputs[j] = arrange<Act>(w, natural, scratch + (keep ? j * floats : 0));
          ready = j + 1;
        }
        const Input& in = inputs[j];
        const V factor = splat(last ? gate : route[j]);
        const uint64_t first = last ? 0 : uint64_t(ids[j]) * a.a_stride;
        for (uint32_t g = g0; g < g1; g++) {
          uint32_t row = g * LILY_ROW_BLOCK, n = smaller(a.H - row, LILY_ROW_BLOCK);
          float y[16] = {}, *s = sum + (g - g0) * 16;
          dot_rows(w, in, first + row, n, y);
          store(s, fma(factor, load(y), load(s)));
        }
      }
      for (uint32_t g = g0; g < g1; g++) {
        uint32_t row = g * LILY_ROW_BLOCK, n = smaller(a.H - row, LILY_ROW_BLOCK);
        float *h = buffer<float>(c, 5) + row, y[16];
        store(y, add(load_n(h, n), load(sum + (g - g0) * 16)));
        store_n(h, load(y), n);
        buffer<float>(c, 6)[g] = ssq_block(y);
      }
    }
  while (keep && next_range(c, begin, end));
}

// ids u32[k], x act[K] (one for all) or act[k,K] (per_expert_input), y f32[k,I], W stack [E, I, K]; y_j = W_ej x(_j).
// I are the rows of W, whichever matrix it is. Threadgroup g: expert g / ceil(I/16).
template <class Act> static void moe_gemv(const KernelCall& c, uint32_t begin, uint32_t end) {
  const auto& a = args<LilyMoeArgs>(c);
  const uint32_t blocks = row_blocks(a.I);
  const uint32_t* ids = buffer<uint32_t>(c, 0);
  Weight w = make_weight(a.a, a.K, c.buffers + 3);
  float* natural = LILY_STACK_FLOATS(vector_floats(a.K));
  float* scratch = LILY_STACK_FLOATS(arranged_floats(w));
  Input in{};
  uint32_t ready = ~0u;  // the input that `in` holds
  for (uint32_t g = begin; g < end; g++) {
    uint32_t j = g / blocks, row = g % blocks * LILY_ROW_BLOCK, n = smaller(a.I - row, LILY_ROW_BLOCK);
    uint32_t source = a.per_expert_input ? j : 0;
    if (source != ready) {
      expand(buffer<const Act>(c, 1) + uint64_t(source) * a.K, a.K, natural);
      in = arrange<Act>(w, natural, scratch);
      ready = source;
    }
    dot_rows(w, in, uint64_t(ids[j]) * a.a_stride + row, n, buffer<float>(c, 2) + uint64_t(j) * a.I + row);
  }
}

}  // namespace lily::cpu::LILY_CPU_NS

LILY_KERNELS(moe, {"moe_gate_up", moe_gate_up<Bf16>, moe_gate_up<F32>}, {"moe_down", moe_down<Bf16>, moe_down<F32>}, {"moe_gemv", moe_gemv<Bf16>, moe_gemv<F32>})
