// Routing of one token by one simdgroup: the k experts with the largest logits, ties to the lower index, in descending order of logit.
// route_j = exp(l_j - l_0) / sum over the chosen, added in that order: softmax over all experts, renormalised over the chosen.
#ifndef LILY_ROUTE_H
#define LILY_ROUTE_H
#include "lily.h"

#define LILY_MAX_EXPERTS 512u  // 16 logits a lane

// Lane j < k leaves with the id and weight of choice j. A collective of 32 lanes; E logits are read once, coalesced.
inline void route_token(device const float* logits, uint E, uint k, uint lane, thread uint& id, thread float& weight) {
  uint key[16];  // 0: no such expert, or taken
  LILY_UNROLL for (uint i = 0; i < 16u; i++) {
    uint e = lane + 32u * i;
    key[i] = 0u;
    if (e < E) key[i] = metal::max(order_key(logits[e] + 0.0f), 1u);
  }
  float mine = 0.0f;
  id = 0u;
  for (uint j = 0; j < k; j++) {
    uint best = 0u, at = 0u;
    LILY_UNROLL for (uint i = 0; i < 16u; i++)
      if (key[i] > best) best = key[i], at = lane + 32u * i;
    uint highest = simd_max(best);
    uint chosen = simd_min(best == highest ? at : 0xffffffffu);
    LILY_UNROLL for (uint i = 0; i < 16u; i++)
      if (lane + 32u * i == chosen) key[i] = 0u;
    if (lane == j) id = chosen, mine = order_value(highest);
  }
  const float first = simd_broadcast(mine, ushort(0));
  float p = lane < k ? metal::exp(mine - first) : 0.0f;
  float sum = 0.0f;
  for (uint j = 0; j < k; j++) sum += simd_shuffle(p, ushort(j));
  weight = p / sum;
}

#endif
