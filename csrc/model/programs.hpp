// The model's programs: decode step, sampler, prefill chunk, head. Each is recorded on first use, for the shape that it is asked for.
#pragma once
#include <array>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "graph/program.hpp"
#include "model/weights.hpp"
#include "ops/sampling.hpp"

namespace lily {

// Symbols bound anew for each submission.
struct StepSymbols {
  Symbol step, next_step, sample, ids, table, state_in, state_out, hidden_in, rows_out, logits, counts, bias, mask, targets, scores, workspace;
  std::array<Symbol, LILY_MAX_SNAPSHOTS> snapshots;
  std::vector<Symbol> k, v;  // per attention layer
  StepSymbols(Symbols& symbols, uint32_t attention_layers);
};

constexpr uint32_t kHeadRows = 64;  // rows of one head tile
constexpr uint32_t kMaxChunk = 16384;

class Model {
 public:
  Model(const ModelSpec& spec, const std::vector<WeightSource>& sources, DType storage);

  const ModelSpec spec;
  const DType storage;
  Symbols symbols;
  const WeightTable weights;
  const StepSymbols use;
  const StateLayout state;

  uint64_t kv_bytes_per_token() const { return uint64_t(2) * spec.attention_layers() * spec.num_kv_heads * spec.head_dim * dtype_bytes(storage); }
  uint64_t kv_block_bytes() const { return uint64_t(LILY_KV_BLOCK) * spec.num_kv_heads * spec.head_dim * dtype_bytes(storage); }  // one layer, K or V

  // One token through all layers and the head: reads step.token and state_in; writes K/V, state_out and logits.
  Program decode(uint32_t context, const Policy& policy) const;  // for steps that see at most so many tokens
  Program sampler() const;
  // Up to `rows` tokens; all_rows also copies every row before the head to rows_out.
  Program prefill(uint32_t rows, bool all_rows, uint32_t context, const Policy& policy) const;
  // hidden_in f32[step.rows, H] (at most 64 rows) to logits, with prefill's arithmetic; or, from a decode step's row, with decode's.
  Program head_rows(uint32_t rows, bool score) const;
  Program head_step() const;

 private:
  GdnState gdn_state(uint32_t index, bool snapshots) const;
  KvUse kv(uint32_t index) const;
  void record_head(Recorder& r, const Slot& x) const;
};

}  // namespace lily
