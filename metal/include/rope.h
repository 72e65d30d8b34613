// Rotary position embedding: pair j is (j, j + R/2) and turns by the fp32 product of the position and theta^(-j / (R/2)), which the model
// means as the fp32 value nearest to the true one. At position 1,000,000 one unit in the last place of it turns a pair by 0.06 radians, so
// it is computed with two floats a number (48 bits, about 250 operations) rather than by pow.
#ifndef LILY_ROPE_H
#define LILY_ROPE_H
#include "lily.h"

// The unevaluated sum high + low, |low| at most half a unit in the last place of high.
struct Twofold {
  float high, low;
};

inline Twofold twofold(float high, float low) {  // |high| >= |low|
  float sum = high + low;
  Twofold t = {sum, low - (sum - high)};
  return t;
}
inline Twofold twofold_product(Twofold a, Twofold b) {
  float p = a.high * b.high;
  return twofold(p, metal::fma(a.high, b.high, -p) + (a.high * b.low + a.low * b.high));
}
inline Twofold twofold_sum(Twofold a, Twofold b) {
  float s = a.high + b.high, v = s - a.high;
  return twofold(s, ((a.high - (s - v)) + (b.high - v)) + (a.low + b.low));
}
inline Twofold twofold_of(float high, float low) {
  Twofold t = {high, low};
  return t;
}

// e^x for |x| < 80: x = n ln 2 + r, |r| < 0.35; the first terms of the series in two floats, the rest in one.
inline Twofold twofold_exp(Twofold x) {
  const float n = metal::rint(x.high * 1.44269504f);
  Twofold nln2 = twofold_product(twofold_of(n, 0.0f), twofold_of(0.693147182464599609375f, -1.9046542121e-9f));
  Twofold r = twofold_sum(x, twofold_of(-nln2.high, -nln2.low));
  float tail = 1.0f / 362880.0f;
  tail = metal::fma(tail, r.high, 1.0f / 40320.0f);
  tail = metal::fma(tail, r.high, 1.0f / 5040.0f);
  tail = metal::fma(tail, r.high, 1.0f / 720.0f);
  Twofold sum = twofold_sum(twofold_of(8.3333337679505348e-3f, -4.3461720333e-10f), twofold_of(tail * r.high, 0.0f));
  sum = twofold_sum(twofold_product(sum, r), twofold_of(4.1666667908430099e-2f, -1.2417634e-9f));
  sum = twofold_sum(twofold_product(sum, r), twofold_of(1.6666667163372039e-1f, -4.9670538e-9f));
  sum = twofold_sum(twofold_product(sum, r), twofold_of(0.5f, 0.0f));
  sum = twofold_sum(twofold_product(sum, r), twofold_of(1.0f, 0.0f));
  sum = twofold_sum(twofold_product(sum, r), twofold_of(1.0f, 0.0f));
  const float power = as_type<float>(uint(int(n) + 127) << 23);
  return twofold_of(sum.high * power, sum.low * power);
}

// ln(x): one Newton step, ln x = y + (x e^-y - 1) - (..)^2 / 2.
inline Twofold twofold_log(float x) {
  const float y = metal::log(x);
  Twofold e = twofold_product(twofold_exp(twofold_of(-y, 0.0f)), twofold_of(x, 0.0f));
  const float m = (e.high - 1.0f) + e.low;
  return twofold(y, metal::fma(-0.5f * m, m, m));
}

// theta^(-j / half), j < half.
inline float rope_frequency(float theta, uint j, uint half_dims) {
  const float q = float(j) / float(half_dims), rest = metal::fma(-q, float(half_dims), float(j)) / float(half_dims);
  Twofold x = twofold_product(twofold_log(theta), twofold_of(-q, -rest));
  return twofold_exp(x).high;
}

// Turns one pair in place.
inline void rope_turn(thread float& a, thread float& b, float angle) {
  const float c = metal::precise::cos(angle), s = metal::precise::sin(angle), x = a, y = b;
  a = x * c - y * s;
  b = y * c + x * s;
}

#endif
