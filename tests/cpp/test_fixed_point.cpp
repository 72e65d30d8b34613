// Activations of decode as fixed point: what a value becomes, and that codes times digits are summed exactly, with the instruction for it and without.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "check.hpp"
#include "kernel_case.hpp"

#include "fixed_point_kernels.hpp"

namespace lily::test {

std::vector<FixedPointForm> fixed_point_forms() {
#if defined(LILY_X86)
  return {fixed_point_avx512, fixed_point_avx2};
#elif defined(LILY_ARM)
  return {fixed_point_neon};
#else
  return {};
#endif
}

namespace {

// Calls check(form) for each form that this processor runs; says which it does not.
template <class Check> void each_form(Check check) {
  for (const FixedPointForm& form : fixed_point_forms()) {
    if (form.runs())
      check(form);
    else
      std::printf("       skipped: this processor has no %s\n", form.name);
  }
}

struct Group {
  alignas(64) float x[64];
  float unit;
  int32_t X[64];
  void make(const FixedPointForm& form) { unit = form.values(x, X); }
};

Group group_of(Random& r, int spread) {
  Group g;
  for (float& x : g.x) {
    const float value = std::ldexp(r.normal(), spread ? -int(r.below(uint32_t(spread))) : 0);
    uint32_t u;
    std::memcpy(&u, &value, 4);
    u &= 0xffff0000u;
    std::memcpy(&x, &u, 4);
  }
  return g;
}

void check_group(const FixedPointForm& form, Group g) {
  g.make(form);
  float most = 0;
  for (float x : g.x) most = std::max(most, std::abs(x));
  for (int i = 0; i < 64; i++) {
    const double off = std::abs(double(g.X[i]) * g.unit - g.x[i]);
    CHECK(off <= g.unit / 2.0);
    if (most > 1e-29f) CHECK(off <= std::ldexp(double(most), -22));
    if (std::abs(g.x[i]) >= std::ldexp(double(most), -14)) CHECK(off == 0 || most < 1e-29f);
    CHECK(std::abs(g.X[i]) <= 255 << 14);
  }
}

LILY_TEST(fixed_point_values) {
  each_form([](const FixedPointForm& form) {
    Random r(7);
    for (int spread : {0, 8, 20, 60, 120})
      for (int turn = 0; turn < 200; turn++) check_group(form, group_of(r, spread));
    Group g;
    for (float x : {0.0f, -0.0f, 1.0f, -1.9921875f, 1.9921875f, 3.3895314e38f, -3.3895314e38f, 1e-39f, 1e-45f, 1e-31f}) {
      std::fill(g.x, g.x + 64, 0.0f);
      g.x[17] = x;
      check_group(form, g);
      std::fill(g.x, g.x + 64, x);
      check_group(form, g);
    }
  });
}

// Codes and digits at random and at their limits, against sums in 64 bits.
LILY_TEST(fixed_point_sums) {
  each_form([](const FixedPointForm& form) {
    Random r(8);
    for (int turn = 0; turn < 600; turn++) {
      Group g[4];
      for (Group& one : g) {
        one = group_of(r, turn % 3 * 12);
        if (turn % 5 == 0) std::fill(one.x, one.x + 64, turn % 2 ? 1.9921875f : -1.9921875f);
        one.make(form);
      }
      float x[256], sums[32], with[32], units[32];
      for (int i = 0; i < 4; i++) std::memcpy(x + 64 * i, g[i].x, 256);
      uint8_t codes[128];
      for (uint8_t& c : codes) c = turn % 5 == 0 ? 0xff : uint8_t(r.next() >> 32);
      form.sums(false, codes, x, sums, units);
      for (int lane = 0; lane < 32; lane++) {
        int64_t exact = 0;
        for (int k = 8 * lane; k < 8 * lane + 8; k++) exact += int64_t(codes[k / 2] >> (k % 2 * 4) & 15) * g[k / 64].X[k % 64];
        CHECK_EQUAL(sums[lane], float(exact));
        CHECK_EQUAL(units[lane], g[lane / 8].unit);
      }
      if (!form.has_byte_products()) continue;
      form.sums(true, codes, x, with, units);
      CHECK(!std::memcmp(sums, with, sizeof(sums)));
    }
  });
}

}  // namespace
}  // namespace lily::test
