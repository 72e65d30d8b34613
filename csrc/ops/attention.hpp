// Gated grouped-query attention over paged K and V.
#pragma once
#include "ops/linear.hpp"

namespace lily {

struct AttentionShape {
  uint32_t H, Hq, Hkv, D, R;
  float rope_theta, eps;
  uint32_t row() const { return 2 * Hq * D + 2 * Hkv * D; }
};

struct AttentionWeights {
  Linear q, k, v, o;
  Vector q_norm, k_norm;
};

struct KvUse {
  Symbol k = kNoSymbol, v = kNoSymbol, table = kNoSymbol;
  uint64_t arena_bytes = 0;  // for the hazard ranges; the arena itself grows
  BufferUse read_k() const { return {k, 0, arena_bytes, Access::read}; }
  BufferUse read_v() const { return {v, 0, arena_bytes, Access::read}; }
  BufferUse write_k() const { return {k, 0, arena_bytes, Access::write}; }
  BufferUse write_v() const { return {v, 0, arena_bytes, Access::write}; }
  BufferUse blocks() const { return {table, 0, arena_bytes, Access::read}; }
};

// How decode attention is cut: split s covers blocks_per_split blocks of keys. Chosen from the context alone.
struct SplitPlan {
  uint32_t n_splits = 1, blocks_per_split = 1;
};
SplitPlan split_plan(uint32_t context_tokens);  // the plan of the bucket that holds this many tokens

void attention_step(Recorder& r, const BufferUse& step, const std::string& label, const AttentionShape& shape, const AttentionWeights& w, const Vector& norm, const KvUse& kv,
                    const SplitPlan& split, const Stream& s);
// `context`: tokens that the last row may see, for devices that cut the chunk's attention by keys (attention_parts dispatches).
void attention_rows(Recorder& r, const RowsOf& t, const std::string& label, const AttentionShape& shape, const AttentionWeights& w, const KvUse& kv, uint32_t context, const Slot& x,
                    const Slot& h);
// A chunk of many rows meets fewer key blocks in one dispatch, so that it takes no longer than one of 2,048 rows.
uint32_t dispatch_key_blocks(const DeviceTraits& traits, uint32_t rows);
uint32_t attention_parts(const DeviceTraits& traits, uint32_t rows, uint32_t context);  // a power of two

}  // namespace lily
