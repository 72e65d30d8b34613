// The architecture's numbers, checked once.
#pragma once
#include <cstdint>
#include <vector>

#include "ops/attention.hpp"
#include "ops/gdn.hpp"
#include "ops/moe.hpp"

namespace lily {

struct ModelSpec {
  uint32_t hidden_size = 0, num_layers = 0, vocab_size = 0;
  uint32_t num_attention_heads = 0, num_kv_heads = 0, head_dim = 0, rotary_dim = 0;
  double rope_theta = 0, rms_norm_eps = 0;
  uint32_t linear_num_key_heads = 0, linear_num_value_heads = 0, linear_key_head_dim = 0, linear_value_head_dim = 0, conv_kernel = 0;
  uint32_t num_experts = 0, experts_per_token = 0, moe_intermediate_size = 0, shared_intermediate_size = 0;  // num_experts 0: dense
  uint32_t intermediate_size = 0;
  bool tied = false;
  std::vector<uint8_t> layer_types;  // 0 linear attention, 1 full attention
  uint32_t max_context = 0;

  // Throws CheckpointError for shapes that the kernels cannot run.
  void check() const;
  bool moe() const { return num_experts > 0; }
  uint32_t linear_layers() const;
  uint32_t attention_layers() const { return num_layers - linear_layers(); }
  GdnShape gdn() const;
  AttentionShape attention() const;
  MoeShape experts() const;
};

// Byte offsets inside a state value: per linear layer its conv rows and its recurrent state, then the last row before the head.
struct StateLayout {
  StateLayout(const ModelSpec& spec, DType storage);
  std::vector<uint64_t> conv, recurrent;  // per linear layer
  uint64_t conv_bytes, recurrent_bytes, hidden, bytes;
};

}  // namespace lily
