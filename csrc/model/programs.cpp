#include "model/programs.hpp"

#include "ops/norm.hpp"

namespace lily {
namespace {

BufferUse whole(Symbol s, uint64_t bytes, Access access) { return {s, 0, bytes, access}; }

}  // namespace

StepSymbols::StepSymbols(Symbols& s, uint32_t attention_layers) {
  step = s.add("step");
  next_step = s.add("next_step");
  sample = s.add("sample");
  ids = s.add("ids");
  table = s.add("block_table");
  state_in = s.add("state_in");
  state_out = s.add("state_out");
  hidden_in = s.add("hidden_in");
  rows_out = s.add("rows_out");
  logits = s.add("logits");
  counts = s.add("counts");
  bias = s.add("bias");
  mask = s.add("mask");
  targets = s.add("targets");
  scores = s.add("scores");
  workspace = s.add("workspace");
  for (size_t i = 0; i < snapshots.size(); i++) snapshots[i] = s.add("snapshot." + std::to_string(i));
  for (uint32_t i = 0; i < attention_layers; i++) {
    k.push_back(s.add("kv." + std::to_string(i) + ".k"));
    v.push_back(s.add("kv." + std::to_string(i) + ".v"));
  }
}

Model::Model(const ModelSpec& spec_, const std::vector<WeightSource>& sources, DType storage_)
    : spec(spec_), storage(storage_), weights(spec, sources, symbols), use(symbols, spec.attention_layers()), state(spec, storage) {}

GdnState Model::gdn_state(uint32_t i, bool snapshots) const {
  GdnState g;
  g.conv_in = {use.state_in, state.conv[i], state.conv_bytes, Access::read};
  g.s_in = {use.state_in, state.recurrent[i], state.recurrent_bytes, Access::read};
  g.conv_out = {use.state_out, state.conv[i], state.conv_bytes, Access::write};
  g.s_out = {use.state_out, state.recurrent[i], state.recurrent_bytes, Access::write};
  if (snapshots)
    for (Symbol s : use.snapshots) {
      g.conv_snapshots.push_back({s, state.conv[i], state.conv_bytes, Access::write});
      g.s_snapshots.push_back({s, state.recurrent[i], state.recurrent_bytes, Access::write});
    }
  return g;
}

KvUse Model::kv(uint32_t i) const { return {use.k[i], use.v[i], use.table, kUnbounded}; }

Program Model::decode(uint32_t context, const Policy& policy) const {
  Program p(use.workspace);
  Recorder r{p, storage, policy};
  const uint32_t H = spec.hidden_size;
  BufferUse step = whole(use.step, sizeof(LilyStep), Access::read), hidden{use.state_out, state.hidden, uint64_t(H) * 4, Access::write};
  Stream s{r.floats("h", H), r.floats("ssq", H / LILY_SSQ_BLOCK)};
  const float eps = float(spec.rms_norm_eps);
  embed_step(r, step, weights.embed, s);
  for (uint32_t i = 0; i < spec.num_layers; i++) {
    const LayerWeights& l = weights.layers[i];
    std::string label = "layers." + std::to_string(i) + ".";
    if (l.attention)
      attention_step(r, step, label + "self_attn", spec.attention(), l.attn, l.input_norm, kv(l.index), context, s);
    else
      gdn_step(r, step, label + "linear_attn", spec.gdn(), l.gdn, l.input_norm, gdn_state(l.index, false), s);
    if (spec.moe()) {
      moe_step(r, step, label + "mlp", spec.experts(), l.moe, l.post_norm, s);
    } else if (policy.fused) {
      Slot act = r.acts("mlp_act", spec.intermediate_size);
      gate_up_norm(r, label + "mlp.gate_up", s, l.post_norm, eps, act, l.mlp_gate, l.mlp_up);
      gemv_residual(r, label + "mlp.down_proj", act, s, l.mlp_down);
    } else {
      RowsOf one{step, 1};
      uint32_t I = spec.intermediate_size;
      Slot x = r.acts("x", H), gate = r.floats("mlp_gate", I), up = r.floats("mlp_up", I), act = r.acts("mlp_act", I), y = r.floats("mlp_y", H);
      residual_norm_rows(r, one, label + "post_attention_layernorm", mixer_out(r, H), s.h, l.post_norm, eps, x);
      gemv(r, label + "mlp.gate_proj", x, gate, {{&l.mlp_gate}});
      gemv(r, label + "mlp.up_proj", x, up, {{&l.mlp_up}});
      swiglu_rows(r, one, label + "mlp.swiglu", gate, up, act, I);
      gemv(r, label + "mlp.down_proj", act, y, {{&l.mlp_down}});
      residual_rows(r, one, label + "mlp.residual", y, s.h, H);
    }
  }
  Slot x = r.acts("x_final", H);
  if (policy.fused) {
    norm_final(r, s, weights.norm, eps, x, hidden);
  } else {
    RowsOf one{step, 1};
    rmsnorm_rows(r, one, "norm", s.h, weights.norm, eps, x);
    take_rows(r, one, s.h, H, hidden, std::vector<BufferUse>(LILY_MAX_SNAPSHOTS), {});
  }
  record_head(r, x);
  return p;
}

void Model::record_head(Recorder& r, const Slot& x) const { gemv(r, "lm_head", x, {use.logits, 0, uint64_t(spec.vocab_size) * 4}, {{&weights.head}}); }

Program Model::sampler() const {
  Program p(use.workspace);
  Recorder r{p, storage, {}};
  const uint64_t V = spec.vocab_size;
  sample(r, spec.vocab_size,
         {whole(use.sample, sizeof(LilySample), Access::read), whole(use.logits, V * 4, Access::read), whole(use.counts, V * 4, Access::read), whole(use.bias, V * 4, Access::read),
          whole(use.mask, (V + 31) / 32 * 4, Access::read), whole(use.next_step, sizeof(LilyStep), Access::write)});
  return p;
}

Program Model::prefill(uint32_t rows, bool all_rows, uint32_t context, const Policy& policy) const {
  Program p(use.workspace, rows);
  Recorder r{p, storage, policy};
  const uint32_t H = spec.hidden_size;
  const uint64_t T = rows;
  const float eps = float(spec.rms_norm_eps);
  RowsOf t{whole(use.step, sizeof(LilyStep), Access::read), rows};
  Slot h = r.floats("h", T * H), x = r.acts("x", T * H);
  embed_rows(r, t, whole(use.ids, T * 4, Access::read), weights.embed, h);
  for (uint32_t i = 0; i < spec.num_layers; i++) {
    const LayerWeights& l = weights.layers[i];
    std::string label = "layers." + std::to_string(i) + ".";
    rmsnorm_rows(r, t, label + "input_layernorm", h, l.input_norm, eps, x);
    if (l.attention)
      attention_rows(r, t, label + "self_attn", spec.attention(), l.attn, kv(l.index), context, x, h);
    else
      gdn_rows(r, t, label + "linear_attn", spec.gdn(), l.gdn, gdn_state(l.index, true), x, h);
    rmsnorm_rows(r, t, label + "post_attention_layernorm", h, l.post_norm, eps, x);
    if (spec.moe()) {
      moe_rows(r, t, label + "mlp", spec.experts(), l.moe, x, h);
      traced(p.last(), "hidden." + std::to_string(i + 1), 6);
    } else {
      uint32_t I = spec.intermediate_size;
      Slot act = r.acts("mlp_act", T * I);
      if (policy.fused) {
        gate_up_rows(r, t, label + "mlp.gate_up", x, act, l.mlp_gate, l.mlp_up);
        gemm_residual(r, t, label + "mlp.down_proj", act, h, l.mlp_down);
      } else {
        Slot gate = r.floats("mlp_gate", T * I), up = r.floats("mlp_up", T * I), y = r.floats("mlp_y", T * H);
        gemm(r, t, label + "mlp.gate_proj", x, gate, l.mlp_gate);
        gemm(r, t, label + "mlp.up_proj", x, up, l.mlp_up);
        swiglu_rows(r, t, label + "mlp.swiglu", gate, up, act, I);
        gemm(r, t, label + "mlp.down_proj", act, y, l.mlp_down);
        residual_rows(r, t, label + "mlp.residual", y, h, H);
        traced(p.last(), "hidden." + std::to_string(i + 1), 2);
      }
    }
  }
  BufferUse hidden{use.state_out, state.hidden, uint64_t(H) * 4, Access::write};
  std::vector<BufferUse> snapshots;
  for (Symbol s : use.snapshots) snapshots.push_back({s, state.hidden, uint64_t(H) * 4, Access::write});
  take_rows(r, t, h, H, hidden, snapshots, all_rows ? whole(use.rows_out, T * H * 4, Access::write) : BufferUse{});
  return p;
}

Program Model::head_rows(uint32_t rows, bool score) const {
  Program p(use.workspace, rows);
  Recorder r{p, storage, {}};
  const uint64_t T = rows, H = spec.hidden_size, V = spec.vocab_size;
  RowsOf t{whole(use.step, sizeof(LilyStep), Access::read), rows};
  Slot x = r.acts("x_rows", T * H);
  rmsnorm_rows(r, t, "norm", {use.hidden_in, 0, T * H * 4}, weights.norm, float(spec.rms_norm_eps), x);
  Slot logits = score ? r.floats("tile_logits", T * V) : Slot{use.logits, 0, T * V * 4};
  gemm(r, t, "lm_head", x, logits, weights.head);
  if (score) score_rows(r, t.step, spec.vocab_size, logits.read(), whole(use.targets, T * 4, Access::read), whole(use.scores, T * 4, Access::write));
  return p;
}

Program Model::head_step() const {
  Program p(use.workspace);
  Recorder r{p, storage, {}};
  const uint64_t H = spec.hidden_size;
  Slot x = r.acts("x_final", H);
  rmsnorm_rows(r, {whole(use.step, sizeof(LilyStep), Access::read), 1}, "norm", {use.hidden_in, 0, H * 4}, weights.norm, float(spec.rms_norm_eps), x);
  record_head(r, x);
  return p;
}

}  // namespace lily
