// Attention over paged keys and values: positions on both sides of a block of keys and of a K/V block; rows nobody wrote are NaN.
#include "kernel_case.hpp"

namespace lily::test {
namespace {

struct Shape {
  uint32_t Hq, Hkv, D, R, position, T;
};

const Shape kShapes[] = {{8, 1, 256, 64, 0, 1}, {4, 2, 64, 64, 63, 3}, {2, 2, 16, 2, 254, 5}, {16, 1, 48, 32, 256, 2}, {4, 4, 80, 80, 511, 17}, {6, 2, 64, 16, 60, 65}};

struct Context {
  Shape s;
  LilyAttnArgs a{};
  uint32_t blocks;
  Words table;
  size_t arena;
  uint32_t end() const { return s.position + s.T; }

  explicit Context(const Shape& shape) : s(shape), blocks(groups_of(shape.position + shape.T, LILY_KV_BLOCK)) {
    a.Hq = s.Hq;
    a.Hkv = s.Hkv;
    a.D = s.D;
    a.R = s.R;
    a.ld = 2 * s.Hq * s.D + 2 * s.Hkv * s.D;
    a.rows_per_group = s.T > 8 ? 16 : 8;
    a.rope_theta = 1e7f;
    a.eps = 1e-6f;
    a.scale = 1.0f / float(s.D);
    for (uint32_t i = 0; i < blocks; i++) table.push_back(blocks - 1 - i);
    arena = size_t(blocks) * s.Hkv * LILY_KV_BLOCK * s.D;
  }
  std::string label() const {
    return std::to_string(s.Hq) + "/" + std::to_string(s.Hkv) + " heads of " + std::to_string(s.D) + ", " + std::to_string(s.T) + " rows from " + std::to_string(s.position);
  }
  // Random rows for the positions below `keys`.
  Operand rows(Random& r, uint32_t keys) const {
    Operand o = out_acts(arena, Role::in);
    for (uint32_t p = 0; p < keys; p++)
      for (uint32_t h = 0; h < s.Hkv; h++) {
        const Floats row = r.normals(s.D);
        const size_t at = ((size_t(table[p / LILY_KV_BLOCK]) * s.Hkv + h) * LILY_KV_BLOCK + p % LILY_KV_BLOCK) * s.D;
        std::memcpy(o.bytes.data() + at * 4, row.data(), row.size() * 4);
      }
    return o;
  }
};

void add_prepare(std::vector<Case>& cases, Random& r, const Context& c) {
  const Shape& s = c.s;
  const size_t T = s.T, qs = T * s.Hq * s.D, ks = T * s.Hkv * s.D;
  const Operand q_norm = floats(r.normals(s.D)), k_norm = floats(r.normals(s.D)), table = words(c.table);
  const Operand arena = out_acts(c.arena, Role::inout);
  LilyStep step{};
  step.rows = 1;
  step.position = s.position;
  cases.push_back(make_case("attn_prepare", c.label(), c.a, {record(step), floats(r.normals(c.a.ld)), q_norm, k_norm, table, arena, arena, out_acts(size_t(s.Hq) * s.D)}, s.Hq + s.Hkv));
  const Operand live = live_rows(s.T, s.position), qkv = floats(r.normals(T * c.a.ld));
  cases.push_back(make_case("attn_prepare_rows", c.label(), c.a, {live, qkv, q_norm, k_norm, table, arena, arena, out_acts(qs)}, s.T + 9));
  LilyAttnArgs a = c.a;
  cases.push_back(make_case("head_norm_rows", c.label(), a, {live, qkv, q_norm, out_floats(qs)}, s.T + 9));
  a.key = 1;
  cases.push_back(make_case("head_norm_rows", c.label() + ", keys", a, {live, qkv, k_norm, out_floats(ks)}, s.T + 9));
  cases.push_back(make_case("rope_rows", c.label(), c.a, {live, floats(r.normals(qs)), out_acts(qs)}, s.T + 9));
  cases.push_back(make_case("kv_write_rows", c.label(), c.a, {live, floats(r.normals(ks)), qkv, table, arena, arena}, s.T + 9));
  cases.push_back(make_case("gate_rows", c.label(), c.a, {live, floats(r.normals(qs)), qkv, out_acts(qs)}, s.T + 9));
}

void add_decode(std::vector<Case>& cases, Random& r, const Context& c) {
  const Shape& s = c.s;
  const size_t heads = size_t(s.Hq) * s.D;
  LilyStep step{};
  step.rows = 1;
  step.position = s.position;
  LilyAttnArgs a = c.a;
  for (uint32_t per_split : {1u, 2u}) {
    a.blocks_per_split = per_split;
    a.n_splits = groups_of(s.position + 1, LILY_KV_BLOCK * per_split) + 1;  // the last one has no key
    cases.push_back(make_case("attn_split", c.label(), a,
                              {record(step), acts(r.normals(heads)), words(c.table), c.rows(r, s.position + 1), c.rows(r, s.position + 1), out_floats(a.n_splits * heads),
                               out_floats(size_t(a.n_splits) * s.Hq * 2)},
                              s.Hkv * a.n_splits));
    Floats ml(size_t(a.n_splits) * s.Hq * 2);
    for (size_t i = 0; i < ml.size(); i += 2) ml[i] = r.normal(), ml[i + 1] = i / 2 / s.Hq + 1 == a.n_splits ? 0 : 1 + float(r.below(8));
    Operand partial = floats(r.normals(a.n_splits * heads)), empty = out_floats(heads);
    std::memcpy(partial.bytes.data() + (a.n_splits - 1) * heads * 4, empty.bytes.data(), heads * 4);  // an empty split's part is never read
    for (uint32_t gated : {0u, 1u}) {
      a.gated = gated;
      cases.push_back(make_case("attn_combine", c.label(), a,
                                {record(step), partial, floats(ml), gated ? out_acts(heads) : out_floats(heads), gated ? floats(r.normals(a.ld)) : absent()}, s.Hq));
    }
  }
}

void add_rows(std::vector<Case>& cases, Random& r, const Context& c) {
  const Shape& s = c.s;
  const size_t n = size_t(s.T) * s.Hq * s.D;
  LilyAttnArgs a = c.a;
  for (uint32_t gated : {0u, 1u}) {
    a.gated = gated;
    cases.push_back(make_case("attn_rows", c.label(), a,
                              {live_rows(s.T, s.position), acts(r.normals(n)), gated ? floats(r.normals(size_t(s.T) * a.ld)) : absent(), words(c.table), c.rows(r, c.end()), c.rows(r, c.end()),
                               gated ? out_acts(n) : out_floats(n)},
                              s.Hkv * (groups_of(s.T, a.rows_per_group) + 1)));
  }
}

}  // namespace

std::vector<Case> attention_cases() {
  std::vector<Case> cases;
  Random r(4);
  for (const Shape& s : kShapes) {
    const Context c(s);
    add_prepare(cases, r, c);
    add_decode(cases, r, c);
    add_rows(cases, r, c);
  }
  return cases;
}

}  // namespace lily::test
