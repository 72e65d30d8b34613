#include "model/weights.hpp"

#include <algorithm>
#include <cmath>
#include <unordered_map>

#include "base/error.hpp"
#include "base/mapped_file.hpp"

namespace lily {

// Looks tensors up by canonical name, checks them against what the spec wants and registers their symbols.
struct TableBuilder {
  WeightTable& table;
  Symbols& symbols;
  std::unordered_map<std::string, const WeightSource*> sources;
  using Transform = WeightTable::Entry::Transform;

  const WeightSource& find(const std::string& name) const {
    auto it = sources.find(name);
    if (it == sources.end()) throw CheckpointError(name, "no such tensor", "the tensor in the checkpoint");
    return *it->second;
  }

  static std::string shape(uint64_t experts, uint64_t rows, uint64_t cols) {
    return "[" + (experts > 1 ? std::to_string(experts) + ", " : "") + std::to_string(rows) + ", " + std::to_string(cols) + "]";
  }

  Linear linear(const std::string& name, uint32_t rows, uint32_t cols, uint32_t experts = 1) {
    const WeightSource& s = find(name);
    if (!s.linear || s.rows != rows || s.cols != cols || s.experts != experts)
      throw CheckpointError(name, shape(s.experts, s.rows, s.cols), shape(experts, rows, cols));
    if (s.expert_stride < rows) throw CheckpointError(name, "experts " + std::to_string(s.expert_stride) + " rows apart", "at least " + std::to_string(rows));
    if (s.format.kind == LILY_W_AFFINE) {
      uint32_t b = s.format.bits, g = s.format.group;
      if (!(b == 2 || b == 3 || b == 4 || b == 5 || b == 6 || b == 8)) throw CheckpointError(name, std::to_string(b) + " bits", "2, 3, 4, 5, 6 or 8 bits");
      if (!(g == 32 || g == 64 || g == 128) || cols % g) throw CheckpointError(name, "group " + std::to_string(g), "a group of 32, 64 or 128 that divides " + std::to_string(cols));
    }
    Linear w;
    w.name = name;
    w.format = s.format;
    w.rows = rows;
    w.cols = cols;
    w.experts = experts;
    w.expert_stride = s.expert_stride;
    WeightTable::Entry entry;
    entry.source = s;
    w.codes = entry.symbols[0] = symbols.add(name + ".weight");
    if (w.affine()) {
      w.scales = entry.symbols[1] = symbols.add(name + ".scales");
      w.biases = entry.symbols[2] = symbols.add(name + ".biases");
    }
    uint64_t codes = w.span_rows() * w.row_bytes(), groups = w.span_rows() * w.row_groups() * 2;
    if (!s.parts.empty()) {
      check_part(s, "weight", codes);
      if (w.affine()) {
        check_part(s, "scales", groups);
        check_part(s, "biases", groups);
      }
    }
    table.bytes_ += uint64_t(experts) * w.matrix_bytes();
    table.entries_.push_back(std::move(entry));
    return w;
  }

  Vector vector(const std::string& name, uint64_t size, Transform transform = Transform::none) {
    const WeightSource& s = find(name);
    if (s.linear || s.elements != size) throw CheckpointError(name, std::to_string(s.linear ? uint64_t(s.rows) * s.cols : s.elements) + " elements", std::to_string(size));
    if (!s.parts.empty()) check_part(s, "weight", size * dtype_bytes(s.dtype));
    WeightTable::Entry entry;
    entry.source = s;
    entry.transform = s.add_one && transform == Transform::none ? Transform::add_one : transform;
    entry.symbols[0] = symbols.add(name + ".weight");
    Vector v{entry.symbols[0], uint32_t(size)};
    table.bytes_ += size * dtype_bytes(s.dtype);
    table.entries_.push_back(std::move(entry));
    return v;
  }

  static void check_part(const WeightSource& s, const std::string& part, uint64_t bytes) {
    auto it = s.parts.find(part);
    std::string name = s.name + "." + part;
    if (it == s.parts.end()) throw CheckpointError(name, "nothing", std::to_string(bytes) + " bytes");
    const PartSource& p = it->second;
    if (p.bytes != bytes) throw CheckpointError(name, std::to_string(p.bytes) + " bytes", std::to_string(bytes) + " bytes");
    if (p.offset > p.file_bytes || p.bytes > p.file_bytes - p.offset)
      throw CheckpointError(name, "bytes up to " + std::to_string(p.offset + p.bytes), "a range within the file's " + std::to_string(p.file_bytes));
  }
};

WeightTable::WeightTable(const ModelSpec& spec, const std::vector<WeightSource>& sources, Symbols& symbols) {
  spec.check();
  TableBuilder b{*this, symbols, {}};
  for (const WeightSource& s : sources) b.sources[s.name] = &s;
  using T = Entry::Transform;
  const uint32_t H = spec.hidden_size, V = spec.vocab_size;
  embed = b.linear("embed_tokens", V, H);
  head = spec.tied ? embed : b.linear("lm_head", V, H);
  norm = b.vector("norm", H);
  GdnShape g = spec.gdn();
  AttentionShape a = spec.attention();
  uint32_t seen[2] = {0, 0};
  for (uint32_t i = 0; i < spec.num_layers; i++) {
    std::string p = "layers." + std::to_string(i) + ".";
    LayerWeights l;
    l.attention = spec.layer_types[i] == 1;
    l.index = seen[l.attention]++;
    l.input_norm = b.vector(p + "input_layernorm", H);
    l.post_norm = b.vector(p + "post_attention_layernorm", H);
    if (l.attention) {
      std::string m = p + "self_attn.";
      l.attn.q = b.linear(m + "q_proj", 2 * a.Hq * a.D, H);
      l.attn.k = b.linear(m + "k_proj", a.Hkv * a.D, H);
      l.attn.v = b.linear(m + "v_proj", a.Hkv * a.D, H);
      l.attn.o = b.linear(m + "o_proj", H, a.Hq * a.D);
      l.attn.q_norm = b.vector(m + "q_norm", a.D);
      l.attn.k_norm = b.vector(m + "k_norm", a.D);
    } else {
      std::string m = p + "linear_attn.";
      l.gdn.qkv = b.linear(m + "in_proj_qkv", g.channels(), H);
      l.gdn.z = b.linear(m + "in_proj_z", g.values(), H);
      l.gdn.b = b.linear(m + "in_proj_b", g.Nv, H);
      l.gdn.a = b.linear(m + "in_proj_a", g.Nv, H);
      l.gdn.out = b.linear(m + "out_proj", H, g.values());
      l.gdn.conv = b.vector(m + "conv1d", uint64_t(g.channels()) * 4, T::taps_first);
      l.gdn.A = b.vector(m + "A_log", g.Nv, T::negative_exp);
      l.gdn.dt_bias = b.vector(m + "dt_bias", g.Nv);
      l.gdn.norm = b.vector(m + "norm", g.Dv);
    }
    std::string f = p + "mlp.";
    if (spec.moe()) {
      const uint32_t E = spec.num_experts, I = spec.moe_intermediate_size, S = spec.shared_intermediate_size;
      l.moe.router = b.linear(f + "gate", E, H);
      l.moe.shared_router = b.linear(f + "shared_expert_gate", 1, H);
      l.moe.gate = b.linear(f + "switch_mlp.gate_proj", I, H, E);
      l.moe.up = b.linear(f + "switch_mlp.up_proj", I, H, E);
      l.moe.down = b.linear(f + "switch_mlp.down_proj", H, I, E);
      l.moe.shared_gate = b.linear(f + "shared_expert.gate_proj", S, H);
      l.moe.shared_up = b.linear(f + "shared_expert.up_proj", S, H);
      l.moe.shared_down = b.linear(f + "shared_expert.down_proj", H, S);
    } else {
      l.mlp_gate = b.linear(f + "gate_proj", spec.intermediate_size, H);
      l.mlp_up = b.linear(f + "up_proj", spec.intermediate_size, H);
      l.mlp_down = b.linear(f + "down_proj", H, spec.intermediate_size);
    }
    layers.push_back(std::move(l));
  }
}

namespace {

// A small tensor as float32 in device memory, with the transform its use asks for.
BufferPtr convert(Device& device, const WeightSource& s, const uint8_t* data, int transform_taps, int transform_exp, int transform_one) {
  BufferPtr buffer = device.allocate(s.elements * 4);
  float* out = reinterpret_cast<float*>(buffer->host());
  for (uint64_t i = 0; i < s.elements; i++) {
    float v;
    if (s.dtype == DType::f32) {
      std::memcpy(&v, data + 4 * i, 4);
    } else {
      uint16_t h;
      std::memcpy(&h, data + 2 * i, 2);
      v = s.dtype == DType::f16 ? f16_to_f32(h) : bf16_to_f32(h);
    }
    if (transform_exp) v = float(-std::exp(double(v)));
    if (transform_one) v = bf16_to_f32(f32_to_bf16(1.0f + v));
    // conv1d is stored as C rows of 4 taps; the kernels read all channels of one tap
    out[transform_taps ? (i % 4) * (s.elements / 4) + i / 4 : i] = v;
  }
  return buffer;
}

}  // namespace

void WeightTable::load(Device& device, Bindings& bindings, const std::function<void(uint64_t, uint64_t)>& progress) const {
  static const char* kParts[3] = {"weight", "scales", "biases"};
  std::vector<FileRange> ranges;
  std::vector<Symbol> symbols;
  for (const Entry& e : entries_) {
    if (e.source.parts.empty()) throw CheckpointError(e.source.name, "no data", "a file range");
    for (int i = 0; i < 3 && e.source.linear; i++) {
      if (e.symbols[i] == kNoSymbol) continue;
      const PartSource& p = e.source.parts.at(kParts[i]);
      ranges.push_back({p.file, p.file_bytes, p.offset, p.bytes});
      symbols.push_back(e.symbols[i]);
    }
  }
  std::vector<Binding> loaded = device.load(ranges, [&](uint64_t done) {
    if (progress) progress(std::min(done, bytes_), bytes_);
  });
  for (size_t i = 0; i < symbols.size(); i++) bindings[symbols[i]] = std::move(loaded[i]);

  std::unordered_map<std::string, std::shared_ptr<MappedFile>> files;
  for (const Entry& e : entries_) {
    if (e.source.linear) continue;
    using T = Entry::Transform;
    const PartSource& p = e.source.parts.at("weight");
    auto& file = files[p.file];
    if (!file) file = MappedFile::open(p.file, p.file_bytes);
    bindings[e.symbols[0]] = {convert(device, e.source, file->data() + p.offset, e.transform == T::taps_first, e.transform == T::negative_exp, e.transform == T::add_one), 0};
  }
  if (progress) progress(bytes_, bytes_);
}

}  // namespace lily
