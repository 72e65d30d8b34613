#include "model/spec.hpp"

#include <algorithm>
#include <string>

#include "base/error.hpp"

namespace lily {
namespace {

void require(bool ok, const char* field, uint64_t found, const char* expected) {
  if (!ok) throw CheckpointError(std::string("config.json: ") + field, std::to_string(found), expected);
}

uint64_t align(uint64_t n) { return (n + 63) / 64 * 64; }

}  // namespace

void ModelSpec::check() const {
  require(hidden_size >= 32 && hidden_size <= 65536 && hidden_size % 32 == 0, "hidden_size", hidden_size, "a multiple of 32 up to 65536");
  require(num_layers >= 1 && num_layers <= 1024 && layer_types.size() == num_layers, "num_hidden_layers", num_layers, "as many as layer_types, 1 to 1024");
  require(vocab_size >= 2 && vocab_size <= (1u << 24), "vocab_size", vocab_size, "2 to 16777216");
  require(head_dim >= 16 && head_dim <= 256 && head_dim % 16 == 0, "head_dim", head_dim, "a multiple of 16 up to 256");
  require(rotary_dim >= 2 && rotary_dim <= head_dim && rotary_dim % 2 == 0, "partial_rotary_factor", rotary_dim, "an even number of rotary dims within the head");
  require(num_kv_heads >= 1 && num_attention_heads >= 1 && num_attention_heads <= 1024 && num_attention_heads % num_kv_heads == 0, "num_attention_heads", num_attention_heads,
          "a multiple of num_key_value_heads");
  require(num_attention_heads / num_kv_heads <= 16, "num_attention_heads", num_attention_heads, "at most 16 for each key-value head");
  if (linear_layers()) {
    require(linear_num_key_heads >= 1 && linear_num_value_heads <= 1024 && linear_num_value_heads >= 1 && linear_num_value_heads % linear_num_key_heads == 0, "linear_num_value_heads",
            linear_num_value_heads, "a multiple of linear_num_key_heads");
    require(linear_key_head_dim >= 16 && linear_key_head_dim <= 256 && linear_key_head_dim % 16 == 0, "linear_key_head_dim", linear_key_head_dim, "a multiple of 16 up to 256");
    require(linear_value_head_dim >= 16 && linear_value_head_dim <= 256 && linear_value_head_dim % 16 == 0, "linear_value_head_dim", linear_value_head_dim, "a multiple of 16 up to 256");
    require(conv_kernel == 4, "linear_conv_kernel_dim", conv_kernel, "4");
  }
  if (moe()) {
    require(num_experts <= 4096, "num_experts", num_experts, "at most 4096");
    require(experts_per_token >= 1 && experts_per_token <= LILY_MAX_EXPERTS_PER_TOKEN && experts_per_token <= num_experts, "num_experts_per_tok", experts_per_token,
            "1 to 16 and at most num_experts");
    require(moe_intermediate_size >= 32 && moe_intermediate_size <= 65536 && moe_intermediate_size % 32 == 0, "moe_intermediate_size", moe_intermediate_size, "a multiple of 32");
    require(shared_intermediate_size >= 32 && shared_intermediate_size <= 65536 && shared_intermediate_size % 32 == 0, "shared_expert_intermediate_size", shared_intermediate_size,
            "a multiple of 32");
  } else {
    require(intermediate_size >= 32 && intermediate_size <= 262144 && intermediate_size % 32 == 0, "intermediate_size", intermediate_size, "a multiple of 32");
  }
  require(max_context >= 1, "max_position_embeddings", max_context, "at least 1");
}

uint32_t ModelSpec::linear_layers() const { return uint32_t(std::count(layer_types.begin(), layer_types.end(), 0)); }

GdnShape ModelSpec::gdn() const {
  return {hidden_size, linear_num_key_heads, linear_num_value_heads, linear_key_head_dim, linear_value_head_dim, float(rms_norm_eps)};
}

AttentionShape ModelSpec::attention() const {
  return {hidden_size, num_attention_heads, num_kv_heads, head_dim, rotary_dim, float(rope_theta), float(rms_norm_eps)};
}

MoeShape ModelSpec::experts() const { return {hidden_size, num_experts, experts_per_token, moe_intermediate_size, shared_intermediate_size, float(rms_norm_eps)}; }

StateLayout::StateLayout(const ModelSpec& spec, DType storage) {
  GdnShape g = spec.gdn();
  conv_bytes = uint64_t(3) * g.channels() * dtype_bytes(storage);
  recurrent_bytes = uint64_t(g.Nv) * g.Dk * g.Dv * 4;
  uint64_t at = 0;
  for (uint32_t i = 0; i < spec.linear_layers(); i++) {
    conv.push_back(at);
    at = align(at + conv_bytes);
    recurrent.push_back(at);
    at = align(at + recurrent_bytes);
  }
  hidden = at;
  bytes = align(at + uint64_t(spec.hidden_size) * 4);
}

}  // namespace lily
