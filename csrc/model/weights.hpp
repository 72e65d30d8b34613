// The weight table: canonical names to descriptors and symbols; and, once loaded, where the bytes are.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "device/device.hpp"
#include "model/spec.hpp"

namespace lily {

// Where one part (weight, scales or biases) of a tensor lies on disk.
struct PartSource {
  std::string file;
  uint64_t offset = 0, bytes = 0, file_bytes = 0;
};

struct WeightSource {
  std::string name;
  bool linear = false;
  // linear
  uint32_t rows = 0, cols = 0, experts = 1, expert_stride = 0;
  LilyFormat format{};
  // vector
  DType dtype = DType::f32;
  uint64_t elements = 0;
  bool add_one = false;  // zero-centred norm of an original checkpoint: used as round_bf16(1 + w)
  std::map<std::string, PartSource> parts;  // empty when only planning
};

struct LayerWeights {
  bool attention = false;
  uint32_t index = 0;  // among the layers of its type
  Vector input_norm, post_norm;
  GdnWeights gdn;
  AttentionWeights attn;
  ExpertWeights moe;
  Linear mlp_gate, mlp_up, mlp_down;
};

class WeightTable {
 public:
  // Checks that all tensors the spec needs are there with the right shapes, and gives each a symbol. CheckpointError names the tensor.
  WeightTable(const ModelSpec& spec, const std::vector<WeightSource>& sources, Symbols& symbols);

  Linear embed, head;
  Vector norm;
  std::vector<LayerWeights> layers;

  uint64_t bytes() const { return bytes_; }  // of the checkpoint's tensors in use
  // Maps the files and binds every weight symbol; small vectors are converted to float32. progress(done, total) in bytes.
  void load(Device& device, Bindings& bindings, const std::function<void(uint64_t, uint64_t)>& progress) const;

 private:
  struct Entry {
    WeightSource source;
    Symbol symbols[3] = {kNoSymbol, kNoSymbol, kNoSymbol};
    enum class Transform { none, add_one, negative_exp, taps_first } transform = Transform::none;
  };
  std::vector<Entry> entries_;
  uint64_t bytes_ = 0;
  friend struct TableBuilder;
};

}  // namespace lily
