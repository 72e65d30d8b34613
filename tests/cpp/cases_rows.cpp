// Embedding, norms and the residual stream; Gated DeltaNet in decode and prefill.
#include "kernel_case.hpp"

namespace lily::test {
namespace {

const char* const kTables[] = {"4g64", "8g64", "bf16", "3g64", "6g32", "5g128", "2g32", "f16", "f32"};

void add_embedding(std::vector<Case>& cases, Random& r) {
  for (const char* name : kTables)
    for (uint32_t H : {64u, 96u, 256u}) {
      const LilyFormat format = format_of(name);
      if (format.kind == LILY_W_AFFINE && H % format.group) continue;
      const uint32_t V = 19;
      LilyEmbedArgs a{format, H, V};
      for (uint32_t token : {0u, V - 1, V}) {  // the last one does not exist
        LilyStep step{};
        step.token = token;
        step.rows = 1;
        std::vector<Operand> buffers{record(step)};
        r.weight(format, V, H).push(buffers);
        buffers.push_back(out_floats(H));
        buffers.push_back(out_floats(H / 16));
        cases.push_back(make_case("embed_step", std::string(name) + " " + std::to_string(H), a, buffers, 1));
      }
      std::vector<Operand> buffers{live_rows(3), words({V - 1, 0xffffffffu, 7})};
      r.weight(format, V, H).push(buffers);
      buffers.push_back(out_floats(size_t(3) * H));
      cases.push_back(make_case("embed_rows", std::string(name) + " " + std::to_string(H), a, buffers, 16));
      LilyGemmArgs expand{};
      expand.fmt = a.fmt;
      expand.K = H;
      expand.N = 3;
      buffers.clear();
      r.weight(format, 3, H).push(buffers);
      buffers.push_back(out_acts(size_t(3) * H));
      cases.push_back(make_case("expand_rows", std::string(name) + " " + std::to_string(H), expand, buffers, 3));
    }
}

void add_norms(std::vector<Case>& cases, Random& r) {
  for (uint32_t H : {32u, 96u, 2048u})
    for (uint32_t T : {1u, 3u}) {
      const std::string label = std::to_string(T) + "x" + std::to_string(H);
      const size_t n = size_t(T) * H;
      LilyNormArgs a{H, 1e-6f, 0};
      cases.push_back(make_case("rmsnorm_rows", label, a, {live_rows(T), floats(r.normals(n)), floats(r.normals(H)), out_acts(n)}, 16));
      cases.push_back(make_case("residual_rows", label, a, {live_rows(T), floats(r.normals(n)), floats(r.normals(n), Role::inout)}, 16));
      cases.push_back(make_case("residual_norm_rows", label, a, {live_rows(T), floats(r.normals(n)), floats(r.normals(n), Role::inout), floats(r.normals(H)), out_acts(n)}, 16));
      const Floats h = r.normals(H);
      for (bool hidden : {false, true})
        cases.push_back(make_case("norm_final", label, a, {floats(h), floats(partial_squares(h)), floats(r.normals(H)), out_acts(H), hidden ? out_floats(H) : absent()}, 1));
      cases.push_back(make_case("residual_step", label, a, {floats(r.normals(H)), floats(h, Role::inout), out_floats(H / 16)}, 1));
      LilyStep step{};
      step.rows = T;
      step.n_snapshots = LILY_MAX_SNAPSHOTS;
      for (uint32_t i = 0; i < LILY_MAX_SNAPSHOTS; i++) step.snapshot_rows[i] = i;  // rows that are not live write nothing
      for (uint32_t all : {0u, 1u}) {
        a.copy_all = all;
        std::vector<Operand> buffers{record(step), floats(r.normals(n)), out_floats(H)};
        for (uint32_t i = 0; i < LILY_MAX_SNAPSHOTS; i++) buffers.push_back(i % 3 == 2 ? absent() : out_floats(H));
        buffers.push_back(all ? out_floats(n) : absent());
        cases.push_back(make_case("take_rows", label, a, buffers, 16));
      }
    }
}

struct Heads {
  uint32_t Nk, Nv, Dk, Dv, T, pad;  // pad: floats between rows of the projections
  uint32_t C() const { return 2 * Nk * Dk + Nv * Dv; }
  uint32_t values() const { return Nv * Dv; }
};

const Heads kHeads[] = {{2, 4, 128, 128, 3, 0}, {1, 1, 16, 16, 1, 5}, {1, 3, 48, 80, 17, 0}, {2, 2, 64, 144, 2, 1}, {1, 17, 16, 32, 4, 0}, {1, 2, 256, 256, 2, 3}};

// n floats a row, ld apart, ending with the last row's last float.
Floats strided(Random& r, uint32_t T, uint32_t n, uint32_t ld) { return r.normals(size_t(T - 1) * ld + n); }
Floats decays(Random& r, uint32_t n) {
  Floats A = r.normals(n);
  for (float& a : A) a = -0.05f - a * a;
  return A;
}

void add_delta(std::vector<Case>& cases, Random& r, const Heads& x) {
  const std::string label = std::to_string(x.Nk) + "/" + std::to_string(x.Nv) + " heads of " + std::to_string(x.Dk) + "x" + std::to_string(x.Dv);
  const uint32_t C = x.C(), V = x.values();
  const size_t T = x.T, S = size_t(x.Nv) * x.Dk * x.Dv;
  LilyGdnArgs a{x.Nk, x.Nv, x.Dk, x.Dv, C + x.pad, V + x.pad, x.Nv + x.pad, 1e-6f};
  const Operand conv_w = floats(r.normals(size_t(4) * C, 0.5f)), A = floats(decays(r, x.Nv)), dt = floats(r.normals(x.Nv)), norm = floats(r.normals(x.Dv));
  const Operand conv_in = acts(r.normals(size_t(3) * C)), S_in = floats(r.normals(S));

  cases.push_back(make_case("gdn_step", label, a,
                            {floats(r.normals(C + V + 2 * x.Nv)), conv_w, A, dt, norm, conv_in, S_in, out_acts(size_t(3) * C), out_floats(S), out_acts(V)}, x.Nv));

  LilyStep step{};
  step.rows = x.T;
  step.n_snapshots = LILY_MAX_SNAPSHOTS;
  for (uint32_t i = 0; i < LILY_MAX_SNAPSHOTS; i++) step.snapshot_rows[i] = i < 3 ? x.T - 1 - i % x.T : i;
  auto snapshots = [&](std::vector<Operand> buffers, const Operand& out) {
    for (uint32_t i = 0; i < LILY_MAX_SNAPSHOTS; i++) buffers.push_back(i % 2 ? absent() : out);
    return buffers;
  };
  cases.push_back(make_case("conv_rows", label, a,
                            snapshots({record(step), floats(strided(r, x.T, C, a.ld_qkv)), conv_w, conv_in, out_acts(size_t(3) * C), out_floats(T * C)}, out_acts(size_t(3) * C)),
                            groups_of(x.T, LILY_CONV_ROWS)));
  const Operand b = floats(strided(r, x.T, x.Nv, a.ld_ba)), alpha = floats(strided(r, x.T, x.Nv, a.ld_ba));
  cases.push_back(make_case("gdn_prepare_rows", label, a, {live_rows(x.T), floats(r.normals(T * C), Role::inout), b, alpha, A, dt, out_floats(T * x.Nv * 2)}, x.T + 13));

  Floats y = r.normals(T * C), gates(T * x.Nv * 2);
  for (size_t i = 0; i < y.size(); i++) y[i] /= float(x.Dk);  // keys no longer than 1: the recurrence contracts
  for (float& g : gates) g = float(r.below(1000)) / 1000;
  cases.push_back(make_case("gdn_scan", label, a, snapshots({record(step), floats(y), floats(gates), S_in, out_floats(S), out_floats(T * V)}, out_floats(S)), x.Nv * groups_of(x.Dv, 64)));
  cases.push_back(make_case("gated_norm_rows", label, a, {live_rows(x.T), floats(r.normals(T * V)), floats(strided(r, x.T, V, a.ld_z)), norm, out_acts(T * V)}, x.T + 13));
}

}  // namespace

std::vector<Case> row_cases() {
  std::vector<Case> cases;
  Random r(3);
  add_embedding(cases, r);
  add_norms(cases, r);
  for (const Heads& x : kHeads) add_delta(cases, r, x);
  return cases;
}

}  // namespace lily::test
