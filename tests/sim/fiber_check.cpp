// Fibres go round in a ring; each keeps its integers and its floating-point numbers. Prints "ok".
#include <cstdio>

#include "fiber.hpp"

using namespace lily_sim;

constexpr unsigned kFibres = 200, kTurns = 50;
static Context contexts[kFibres], main_context;
static unsigned running = 0, finished = 0;
static double sums[kFibres];
static bool right = true;

static void go_on(unsigned self) {
  running = (self + 1) % kFibres;
  switch_context(&contexts[self], &contexts[running]);
}

static void body() {
  const unsigned self = running;
  volatile double aligned_probe[2] = {0.0, 0.0};
  double a = self, b = 0.5 * self, c = -1.0 * self, d = 1.0 / (self + 1);
  unsigned long n = self * 977ul;
  for (unsigned turn = 0; turn < kTurns; turn++) {
    a += 1, b += 2, c += 3, d *= 0.5, n = n * 31 + turn;
    go_on(self);
    aligned_probe[turn % 2] = a;
  }
  unsigned long expected = self * 977ul;
  double e = 1.0 / (self + 1);
  for (unsigned turn = 0; turn < kTurns; turn++) expected = expected * 31 + turn, e *= 0.5;
  right = right && n == expected && d == e && a == self + kTurns && b == 0.5 * self + 2 * kTurns && c == -1.0 * self + 3 * kTurns && aligned_probe[1] == a;
  sums[self] = a;
  if (++finished == kFibres) switch_context(&contexts[self], &main_context);
  go_on(self);
}

int main() {
  Stacks stacks;
  for (unsigned i = 0; i < kFibres; i++) {
    stacks.mark(i);
    prepare_context(&contexts[i], stacks.low(i), stacks.high(i), body);
  }
  switch_context(&main_context, &contexts[0]);
  for (unsigned i = 0; i < kFibres; i++) right = right && !stacks.overflowed(i) && sums[i] == i + kTurns;
  std::puts(right && finished == kFibres ? "ok" : "wrong");
  return right ? 0 : 1;
}
