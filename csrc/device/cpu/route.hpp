// Routing of one token: the k experts with the largest logits, ties to the lower index, in descending order of logit; softmax over all
// experts orders them alike. route_j = exp(l_j - l_max) / sum over the chosen, added in that order, which is p_j / sum of the chosen p.
#pragma once
#include "args.h"
#include "device/cpu/simd.hpp"

namespace lily::cpu::LILY_CPU_NS {

LILY_INLINE void route_token(const float* logits, uint32_t E, uint32_t k, uint32_t* ids, float* route) {
  float top[LILY_MAX_EXPERTS_PER_TOKEN];
  uint32_t n = 0;
  for (uint32_t e = 0; e < E; e++) {
    float l = logits[e];
    if (n == k && !(l > top[k - 1])) continue;
    uint32_t at = n < k ? n++ : k - 1;
    for (; at && l > top[at - 1]; at--) top[at] = top[at - 1], ids[at] = ids[at - 1];
    top[at] = l;
    ids[at] = e;
  }
  float p[16], sum = 0;
  for (uint32_t i = 0; i < 16; i++) p[i] = i < k ? top[i] - top[0] : 0;
  store(p, exp(load(p)));
  for (uint32_t j = 0; j < k; j++) sum += p[j];
  for (uint32_t j = 0; j < k; j++) route[j] = p[j] / sum;
}

}  // namespace lily::cpu::LILY_CPU_NS
