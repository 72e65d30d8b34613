#include "bind/convert.hpp"

#include <nanobind/stl/string.h>

#include <algorithm>

#include "device/cpu/cpu_device.hpp"
#include "device/shader/launch.hpp"

namespace nb = nanobind;

namespace lily::bind {
namespace {

template <class T>
T get(const nb::dict& d, const char* key) {
  if (!d.contains(key)) throw InvalidArgument(std::string("missing field '") + key + "'");
  try {
    return nb::cast<T>(d[key]);
  } catch (const nb::cast_error&) {
    throw InvalidArgument(std::string("field '") + key + "' has the wrong type or is out of range");
  }
}

template <class T>
T get_or(const nb::dict& d, const char* key, T fallback) {
  return d.contains(key) && !d[key].is_none() ? get<T>(d, key) : fallback;
}

PartSource part_from(const nb::dict& d) {
  return {get<std::string>(d, "file"), get<uint64_t>(d, "offset"), get<uint64_t>(d, "bytes"), get<uint64_t>(d, "file_bytes")};
}

}  // namespace

ModelSpec spec_from(const nb::dict& d) {
  ModelSpec s;
  s.hidden_size = get<uint32_t>(d, "hidden_size");
  s.num_layers = get<uint32_t>(d, "num_layers");
  s.vocab_size = get<uint32_t>(d, "vocab_size");
  s.num_attention_heads = get<uint32_t>(d, "num_attention_heads");
  s.num_kv_heads = get<uint32_t>(d, "num_kv_heads");
  s.head_dim = get<uint32_t>(d, "head_dim");
  s.rotary_dim = get<uint32_t>(d, "rotary_dim");
  s.rope_theta = get<double>(d, "rope_theta");
  s.rms_norm_eps = get<double>(d, "rms_norm_eps");
  s.linear_num_key_heads = get<uint32_t>(d, "linear_num_key_heads");
  s.linear_num_value_heads = get<uint32_t>(d, "linear_num_value_heads");
  s.linear_key_head_dim = get<uint32_t>(d, "linear_key_head_dim");
  s.linear_value_head_dim = get<uint32_t>(d, "linear_value_head_dim");
  s.conv_kernel = get<uint32_t>(d, "conv_kernel");
  s.num_experts = get<uint32_t>(d, "num_experts");
  s.experts_per_token = get<uint32_t>(d, "experts_per_token");
  s.moe_intermediate_size = get<uint32_t>(d, "moe_intermediate_size");
  s.shared_intermediate_size = get<uint32_t>(d, "shared_intermediate_size");
  s.intermediate_size = get<uint32_t>(d, "intermediate_size");
  s.tied = get<bool>(d, "tied");
  s.max_context = get<uint32_t>(d, "max_context");
  for (nb::handle h : get<nb::list>(d, "layer_types")) s.layer_types.push_back(nb::cast<int>(h) != 0);
  return s;
}

std::vector<WeightSource> weights_from(const nb::list& list) {
  std::vector<WeightSource> result;
  for (nb::handle h : list) {
    nb::dict d = nb::cast<nb::dict>(h);
    WeightSource s;
    s.name = get<std::string>(d, "name");
    s.linear = get<std::string>(d, "kind") == "linear";
    if (s.linear) {
      s.rows = get<uint32_t>(d, "rows");
      s.cols = get<uint32_t>(d, "cols");
      s.experts = get<uint32_t>(d, "experts");
      s.expert_stride = get<uint32_t>(d, "expert_stride_rows");
      std::string format = get<std::string>(d, "format");
      s.format.kind = format == "affine" ? LILY_W_AFFINE : format == "bf16" ? LILY_W_BF16 : format == "f16" ? LILY_W_F16 : LILY_W_F32;
      if (format == "affine") {
        s.format.bits = get<uint32_t>(d, "bits");
        s.format.group = get<uint32_t>(d, "group");
      } else if (format != "bf16" && format != "f16" && format != "f32") {
        throw CheckpointError(s.name, "format " + format, "affine, bf16, f16 or f32");
      }
      if (s.experts < 1) throw CheckpointError(s.name, "no experts", "at least one");
    } else {
      std::string dtype = get<std::string>(d, "dtype");
      if (dtype != "bf16" && dtype != "f16" && dtype != "f32") throw CheckpointError(s.name, "dtype " + dtype, "bf16, f16 or f32");
      s.dtype = dtype == "bf16" ? DType::bf16 : dtype == "f16" ? DType::f16 : DType::f32;
      s.elements = 1;
      for (nb::handle n : get<nb::list>(d, "shape")) s.elements *= nb::cast<uint32_t>(n);
      s.add_one = get_or<bool>(d, "add_one", false);
    }
    if (d.contains("parts"))
      for (auto [key, value] : get<nb::dict>(d, "parts")) s.parts[nb::cast<std::string>(key)] = part_from(nb::cast<nb::dict>(value));
    result.push_back(std::move(s));
  }
  return result;
}

SamplingParams sampling_from(const nb::dict& d) {
  SamplingParams p;
  p.temperature = get_or<float>(d, "temperature", 0);
  p.top_k = get_or<uint32_t>(d, "top_k", 0);
  p.top_p = get_or<float>(d, "top_p", 1);
  p.min_p = get_or<float>(d, "min_p", 0);
  p.repetition_penalty = get_or<float>(d, "repetition_penalty", 1);
  p.presence_penalty = get_or<float>(d, "presence_penalty", 0);
  p.frequency_penalty = get_or<float>(d, "frequency_penalty", 0);
  p.seed = get_or<uint64_t>(d, "seed", 0);
  p.logprobs = get_or<int>(d, "logprobs", -1);
  p.masked = get_or<bool>(d, "masked", false);
  if (p.logprobs > LILY_MAX_LOGPROBS) throw SamplingError("logprobs is " + std::to_string(p.logprobs) + ", expected at most " + std::to_string(LILY_MAX_LOGPROBS));
  if (d.contains("logit_bias") && !d["logit_bias"].is_none())
    for (auto [key, value] : get<nb::dict>(d, "logit_bias")) p.logit_bias.emplace_back(nb::cast<int32_t>(key), nb::cast<float>(value));
  return p;
}

nb::dict device_dict(const DeviceInfo& info) {
  nb::dict d;
  d["name"] = info.name;
  d["kind"] = info.kind;
  d["description"] = info.description;
  d["isa"] = info.isa;
  d["threads"] = info.threads;
  d["memory_bytes"] = info.memory_bytes;
  d["storage"] = info.storage;
  return d;
}

nb::list dispatch_list(const Program& program, const Stages& stages, bool on_cpu) {
  std::vector<uint32_t> stage_of(program.dispatches().size());
  for (uint32_t s = 0; s < stages.size(); s++)
    for (uint32_t d : stages[s]) stage_of[d] = s;
  const auto waits_for = program.waits_for(stages);
  const Tuning tuning = on_cpu ? Tuning{} : Tuning::from_environment();
  nb::list list;
  for (size_t i = 0; i < stage_of.size(); i++) {
    const Dispatch& d = program.dispatches()[i];
    nb::dict item;
    item["kernel"] = d.format.empty() ? d.kernel : d.kernel + "_" + d.format;
    item["label"] = d.label;
    item["stage"] = stage_of[i];
    item["groups"] = d.groups;
    item["bytes_read"] = d.bytes_read;
    item["bytes_written"] = d.bytes_written;
    item["reason"] = d.reason;
    nb::list after;
    for (uint32_t before : waits_for[i]) after.append(before);
    item["after"] = after;
    if (on_cpu) {
      const CpuChoice choice = choose_cpu_kernel(d.kernel);
      item["cpu"] = choice.isa;
      item["cpu_reason"] = choice.reason;
    } else {
      const Launch launch = plan_launch(d, tuning);
      item["metal"] = launch.function;
      item["metal_reason"] = launch.reason;
    }
    list.append(item);
  }
  return list;
}

nb::dict plan_dict(const Model& model, const Policy& policy, uint32_t chunk) {
  const bool on_cpu = !policy.traits.tile_map;
  Program forward = model.decode(LILY_KV_BLOCK, policy), sample = model.sampler(), prefill = model.prefill(chunk, false, chunk, policy);
  Stages forward_stages = forward.stages(), sample_stages = sample.stages(), prefill_stages = prefill.stages();
  nb::dict plan, decode, chunk_plan, memory;
  // Weights, states and activations of one token; K and V depend on the context and are reported by the token.
  uint64_t bytes = 0;
  for (const Program* p : {&forward, &sample})
    for (const Dispatch& d : p->dispatches()) bytes += d.bytes_read + d.bytes_written;
  decode["dispatches"] = forward.dispatches().size() + sample.dispatches().size();
  decode["stages"] = forward_stages.size() + sample_stages.size();
  decode["bytes"] = bytes;
  decode["forward"] = dispatch_list(forward, forward_stages, on_cpu);
  decode["sample"] = dispatch_list(sample, sample_stages, on_cpu);
  chunk_plan["rows"] = chunk;
  chunk_plan["dispatches"] = prefill.dispatches().size();
  chunk_plan["stages"] = prefill_stages.size();
  chunk_plan["list"] = dispatch_list(prefill, prefill_stages, on_cpu);
  memory["weights"] = model.weights.bytes();
  memory["state_bytes"] = model.state.bytes;
  memory["kv_bytes_per_token"] = model.kv_bytes_per_token();
  memory["workspace_bytes"] = std::max({forward.workspace_bytes(), sample.workspace_bytes(), prefill.workspace_bytes(), model.head_rows(16, false).workspace_bytes()});
  // A shorter prompt takes a smaller program.
  nb::list by_rows;
  const uint64_t least = std::max({forward.workspace_bytes(), sample.workspace_bytes(), model.head_rows(16, false).workspace_bytes()});
  for (uint32_t rows = std::min(16u, chunk); rows <= chunk; rows = rows < chunk ? std::min(2 * rows, chunk) : rows + 1) {
    nb::list entry;
    entry.append(rows);
    entry.append(std::max(least, model.prefill(rows, false, rows, policy).workspace_bytes()));
    by_rows.append(entry);
  }
  memory["workspace_by_rows"] = by_rows;
  plan["decode"] = decode;
  plan["prefill"] = chunk_plan;
  plan["memory"] = memory;
  return plan;
}

}  // namespace lily::bind
