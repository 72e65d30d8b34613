#include "ops/attention.hpp"

#include <algorithm>
#include <bit>
#include <cmath>

#include "ops/norm.hpp"

namespace lily {
namespace {

LilyAttnArgs attn_args(const AttentionShape& m) {
  LilyAttnArgs a{};
  a.Hq = m.Hq;
  a.Hkv = m.Hkv;
  a.D = m.D;
  a.R = m.R;
  a.ld = m.row();
  a.gated = 1;
  a.rows_per_group = 8;
  a.rope_theta = m.rope_theta;
  a.eps = m.eps;
  a.scale = 1.0f / std::sqrt(float(m.D));
  return a;
}

// Norms, rope and the K/V write as single kernels: the twins of attn_prepare and attn_prepare_rows.
void record_prepare(Recorder& r, const RowsOf& t, const std::string& label, const AttentionShape& m, const AttentionWeights& w, const KvUse& kv, const Slot& qkv, const Slot& q) {
  LilyAttnArgs a = attn_args(m);
  uint64_t T = t.rows;
  Slot qn = r.floats("q_normed", T * m.Hq * m.D), kn = r.floats("k_normed", T * m.Hkv * m.D);
  Dispatch d = make_dispatch("head_norm_rows", label + ".q_norm", a, {t.step, qkv.read(), w.q_norm.read(), qn.write()}, t.rows);
  traced(d, label + ".q_norm.out", 3);
  r.program.record(std::move(d));
  a.key = 1;
  d = make_dispatch("head_norm_rows", label + ".k_norm", a, {t.step, qkv.read(), w.k_norm.read(), kn.write()}, t.rows);
  traced(d, label + ".k_norm.out", 3);
  r.program.record(std::move(d));
  a.key = 0;
  r.program.record(make_dispatch("rope_rows", label + ".rope", a, {t.step, qn.read(), q.write()}, t.rows));
  r.program.record(make_dispatch("kv_write_rows", label + ".kv_write", a, {t.step, kn.read(), qkv.read(), kv.blocks(), kv.write_k(), kv.write_v()}, t.rows));
}

}  // namespace

SplitPlan split_plan(uint32_t context_tokens) {
  uint32_t n = std::max<uint32_t>(1, blocks(context_tokens, LILY_KV_BLOCK));
  uint32_t bucket = std::bit_ceil(n);
  if (bucket <= LILY_MAX_SPLITS) return {bucket, 1};
  return {LILY_MAX_SPLITS, bucket / LILY_MAX_SPLITS};
}

uint32_t dispatch_key_blocks(const DeviceTraits& traits, uint32_t rows) {
  return rows <= 2048 || !traits.key_blocks ? traits.key_blocks : std::max<uint32_t>(1, uint32_t(uint64_t(traits.key_blocks) * 2048 / rows));
}

uint32_t decode_bucket(const DeviceTraits& traits, uint32_t context) {
  const SplitPlan split = split_plan(context);
  const uint32_t end = split.n_splits * split.blocks_per_split * LILY_KV_BLOCK, edge = traits.long_context;
  return context < edge && edge <= end ? edge - 1 : end;
}

uint32_t attention_parts(const DeviceTraits& traits, uint32_t rows, uint32_t context) {
  if (!traits.key_blocks) return 1;
  return std::bit_ceil(std::max<uint32_t>(1, blocks(context, dispatch_key_blocks(traits, rows) * LILY_KV_BLOCK)));
}

void attention_step(Recorder& r, const BufferUse& step, const std::string& label, const AttentionShape& m, const AttentionWeights& w, const Vector& norm, const KvUse& kv,
                    uint32_t context, const Stream& s) {
  const SplitPlan split = split_plan(context);
  LilyAttnArgs a = attn_args(m);
  a.n_splits = split.n_splits;
  a.blocks_per_split = split.blocks_per_split;
  uint32_t qd = 2 * m.Hq * m.D, kd = m.Hkv * m.D;
  Slot qkv = r.floats("qkv_heads", m.row()), q = r.acts("q", m.Hq * m.D), heads = r.acts("attn_heads", m.Hq * m.D);
  Slot o = r.floats("attn_partial", uint64_t(split.n_splits) * m.Hq * m.D), ml = r.floats("attn_ml", uint64_t(split.n_splits) * m.Hq * 2);
  const uint32_t edge = r.policy.traits.long_context;
  const bool is_long = edge && context >= edge && m.D == 256 && m.Hq == 8 * m.Hkv;
  auto record_split = [&] {
    Dispatch d = make_dispatch(is_long ? "attn_split_long" : "attn_split", label + ".split", a, {step, q.read(), kv.blocks(), kv.read_k(), kv.read_v(), o.write(), ml.write()},
                               uint64_t(m.Hkv) * split.n_splits);
    d.even = false;  // the last splits of the bucket may have no keys yet
    if (edge) d.reason = is_long ? "context from " + std::to_string(edge) + " tokens on, head dim 256, 8 query heads a key head" : "general form";
    r.program.record(std::move(d));
  };
  const std::vector<Segment> projections{{&w.q, 0}, {&w.k, qd}, {&w.v, qd + kd}};
  if (r.policy.fused) {
    gemv_norm(r, label + ".qkv_proj", s, norm, m.eps, qkv, projections);
    Dispatch d = make_dispatch("attn_prepare", label + ".prepare", a,
                               {step, qkv.read(), w.q_norm.read(), w.k_norm.read(), kv.blocks(), kv.write_k(), kv.write_v(), q.write()}, m.Hq + m.Hkv);
    d.reason = r.policy.reason;
    r.program.record(std::move(d));
    record_split();
    r.program.record(make_dispatch("attn_combine", label + ".combine", a, {step, o.read(), ml.read(), heads.write(), qkv.read()}, m.Hq));
    gemv_residual(r, label + ".o_proj", heads, s, w.o);
    return;
  }
  RowsOf one{step, 1};
  Slot x = r.acts("x", m.H), out = r.floats("attn_out", m.Hq * m.D);
  rmsnorm_rows(r, one, label + ".input_layernorm", s.h, norm, m.eps, x);
  gemv(r, label + ".qkv_proj", x, qkv, projections);
  record_prepare(r, one, label, m, w, kv, qkv, q);
  record_split();
  a.gated = 0;
  r.program.record(make_dispatch("attn_combine", label + ".combine", a, {step, o.read(), ml.read(), out.write(), {}}, m.Hq));
  r.program.record(make_dispatch("gate_rows", label + ".gate", a, {step, out.read(), qkv.read(), heads.write()}, 1));
  gemv(r, label + ".o_proj", heads, mixer_out(r, m.H), {{&w.o}});
}

void attention_rows(Recorder& r, const RowsOf& t, const std::string& label, const AttentionShape& m, const AttentionWeights& w, const KvUse& kv, uint32_t context, const Slot& x,
                    const Slot& h) {
  LilyAttnArgs a = attn_args(m);
  uint64_t T = t.rows;
  uint32_t qd = 2 * m.Hq * m.D, kd = m.Hkv * m.D;
  Slot qkv = r.floats("qkv_heads", T * m.row()), q = r.acts("q", T * m.Hq * m.D), heads = r.acts("attn_heads", T * m.Hq * m.D);
  gemm(r, t, label + ".q_proj", x, qkv, w.q, m.row(), 0);
  gemm(r, t, label + ".k_proj", x, qkv, w.k, m.row(), qd);
  gemm(r, t, label + ".v_proj", x, qkv, w.v, m.row(), qd + kd);
  auto record_attention = [&](const BufferUse& gate, const Slot& out) {
    std::vector<BufferUse> uses{t.step, q.read(), gate, kv.blocks(), kv.read_k(), kv.read_v(), out.write()};
    const uint32_t parts = attention_parts(r.policy.traits, t.rows, context);
    a.key_blocks = dispatch_key_blocks(r.policy.traits, t.rows);
    if (parts > 1) {
      uses[6] = out.update();  // each part writes the rows whose own position it meets
      uses.push_back(r.floats("attn_rows_o", T * m.Hq * m.D).update());
      uses.push_back(r.floats("attn_rows_ml", T * m.Hq * 2).update());
    }
    for (uint32_t i = 0; i < parts; i++) {
      a.first_block = i * a.key_blocks;
      r.program.record(make_dispatch("attn_rows", label + ".attention", a, uses, uint64_t(m.Hkv) * blocks(T, a.rows_per_group)));
    }
  };
  if (r.policy.fused) {
    Dispatch d = make_dispatch("attn_prepare_rows", label + ".prepare", a,
                               {t.step, qkv.read(), w.q_norm.read(), w.k_norm.read(), kv.blocks(), kv.write_k(), kv.write_v(), q.write()}, t.rows);
    d.reason = r.policy.reason;
    r.program.record(std::move(d));
    record_attention(qkv.read(), heads);
    gemm_residual(r, t, label + ".o_proj", heads, h, w.o);
    return;
  }
  Slot out = r.floats("attn_out", T * m.Hq * m.D), y = r.floats("mixer_y", T * m.H);
  record_prepare(r, t, label, m, w, kv, qkv, q);
  a.gated = 0;
  record_attention({}, out);
  r.program.record(make_dispatch("gate_rows", label + ".gate", a, {t.step, out.read(), qkv.read(), heads.write()}, t.rows));
  gemm(r, t, label + ".o_proj", heads, y, w.o);
  residual_rows(r, t, label + ".residual", y, h, m.H);
}

}  // namespace lily
