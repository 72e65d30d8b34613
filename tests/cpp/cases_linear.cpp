// Matrix-vector and matrix-matrix kernels: every weight format, rows on both sides of a threadgroup, K on both sides of a step.
#include "kernel_case.hpp"

namespace lily::test {
namespace {

const char* const kFormats[] = {"4g64", "8g64", "bf16", "2g32", "3g64", "5g128", "6g32", "4g32", "4g128", "8g32", "f16", "f32"};
const uint32_t kRows[] = {1, 15, 16, 17, 63, 64, 65};
const uint32_t kDepths[] = {64, 96, 128, 192, 320, 2048};

bool fits(const LilyFormat& f, uint32_t K) { return f.kind != LILY_W_AFFINE || K % f.group == 0; }

// Two formats for the same K: the second differs where it can, so that fused kernels meet mixed checkpoints.
LilyFormat partner(const LilyFormat& f, uint32_t K, uint32_t turn) {
  const LilyFormat other = format_of(turn % 2 ? "8g64" : "bf16");
  return turn % 3 && fits(other, K) ? other : f;
}

struct Shape {
  std::string label;
  LilyFormat format;
  uint32_t K, rows, turn;
};

void add_gemv(std::vector<Case>& cases, Random& r, const Shape& s) {
  LilyGemvArgs a{s.format, s.K, 1, 0, {{s.rows, s.turn % 3, s.turn % 2}}};
  std::vector<Operand> buffers{acts(r.normals(s.K)), out_floats(s.rows + s.turn % 3)};
  r.weight(s.format, s.rows, s.K).push(buffers);
  cases.push_back(make_case("gemv", s.label, a, buffers, groups_of(s.rows, 16)));

  a.seg[0] = {s.rows, 0, 0};
  buffers = {acts(r.normals(s.K)), floats(r.normals(s.rows), Role::inout), out_floats(groups_of(s.rows, 16))};
  r.weight(s.format, s.rows, s.K).push(buffers);
  cases.push_back(make_case("gemv_residual", s.label, a, buffers, groups_of(s.rows, 16)));
}

void add_norm_gemv(std::vector<Case>& cases, Random& r, const Shape& s) {
  const Floats h = r.normals(s.K);
  const Floats norm = r.normals(s.K);
  LilyGemvArgs a{s.format, s.K, 3, 1e-6f, {{s.rows, 18, 1}, {1, 0, 0}, {17, 1, 1}}};
  std::vector<Operand> buffers{floats(h), floats(partial_squares(h)), floats(norm), out_floats(18 + s.rows)};
  uint32_t groups = 0;
  for (uint32_t i = 0; i < a.n_segments; i++) {
    r.weight(s.format, a.seg[i].rows, s.K).push(buffers);
    groups += groups_of(a.seg[i].rows, 16);
  }
  cases.push_back(make_case("gemv_norm", s.label, a, buffers, groups));

  buffers = {acts(h), out_floats(18 + s.rows)};
  for (uint32_t i = 0; i < a.n_segments; i++) r.weight(s.format, a.seg[i].rows, s.K).push(buffers);
  cases.push_back(make_case("gemv", s.label + " in segments", a, buffers, groups));

  LilyGateUpArgs g{s.format, partner(s.format, s.K, s.turn), s.K, s.rows, 1e-6f};
  buffers = {floats(h), floats(partial_squares(h)), floats(norm), out_acts(s.rows)};
  r.weight(g.gate, s.rows, s.K).push(buffers);
  r.weight(g.up, s.rows, s.K).push(buffers);
  cases.push_back(make_case("gate_up_norm", s.label, g, buffers, groups_of(s.rows, 16)));
}

// T live rows: the buffers of rows hold no more.
void add_gemm(std::vector<Case>& cases, Random& r, const Shape& s, uint32_t T) {
  LilyGemmArgs a{};
  a.fmt = s.format;
  a.up = partner(s.format, s.K, s.turn);
  a.K = s.K;
  a.N = s.rows;
  a.ldy = s.rows + s.turn % 5;
  a.out = s.turn % 5;
  a.round = s.turn % 2;
  a.rows_per_token = 1;
  const std::string label = s.label + " of " + std::to_string(T);
  const uint32_t groups = groups_of(T, LILY_GEMM_ROWS) * groups_of(s.rows, 64);
  const Operand x = acts(r.normals(size_t(T) * s.K));
  std::vector<Operand> buffers{live_rows(T), x, out_floats(size_t(T) * a.ldy)};
  r.weight(a.fmt, s.rows, s.K).push(buffers);
  cases.push_back(make_case("gemm", label, a, buffers, groups));

  buffers = {live_rows(T), x, floats(r.normals(size_t(T) * s.rows), Role::inout)};
  r.weight(a.fmt, s.rows, s.K).push(buffers);
  cases.push_back(make_case("gemm_residual", label, a, buffers, groups));

  buffers = {live_rows(T), x, out_acts(size_t(T) * s.rows)};
  r.weight(a.fmt, s.rows, s.K).push(buffers);
  r.weight(a.up, s.rows, s.K).push(buffers);
  cases.push_back(make_case("gate_up_rows", label, a, buffers, groups));
}

}  // namespace

std::vector<Case> linear_cases() {
  std::vector<Case> cases;
  Random r(1);
  uint32_t turn = 0;
  for (const char* name : kFormats) {
    const LilyFormat format = format_of(name);
    for (uint32_t K : kDepths) {
      if (!fits(format, K)) continue;
      for (uint32_t rows : kRows) {
        turn++;
        // The formats with kernels of their own meet every row count at the depths around a step, everything else some of them.
        const bool own = format.kind == LILY_W_BF16 || (format.group == 64 && (format.bits == 4 || format.bits == 8));
        if (!(own && K <= 192) && turn % 7 != 0) continue;
        Shape s{std::string(name) + " " + std::to_string(rows) + "x" + std::to_string(K), format, K, rows, turn};
        add_gemv(cases, r, s);
        add_norm_gemv(cases, r, s);
        if (own && K == 192) add_gemm(cases, r, s, kRows[turn % 7]);
        else if (turn % 3 == 0 && K < 2048) add_gemm(cases, r, s, kRows[turn % 4]);
      }
    }
  }
  for (uint32_t T : {1u, 3u}) add_gemm(cases, r, {"4g64 17x2048", format_of("4g64"), 2048, 17, T}, T);
  // more rows than one pass over the weights takes
  add_gemm(cases, r, {"4g64 33x64", format_of("4g64"), 64, 33, 1}, 257);

  for (uint32_t T : {1u, 5u})
    for (uint32_t N : {1u, 15u, 64u}) {
      LilyGemmArgs a{};
      a.N = N;
      a.rows_per_token = T == 5 ? 3 : 1;
      const size_t n = size_t(T) * N * a.rows_per_token;
      cases.push_back(make_case("swiglu_rows", "swiglu " + std::to_string(N), a, {live_rows(T), floats(r.normals(n, 3)), floats(r.normals(n)), out_acts(n)}, T + 3));
    }
  return cases;
}

}  // namespace lily::test
