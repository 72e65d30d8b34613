#include "fixture.hpp"

#include <cstdlib>
#include <fstream>
#include <sstream>

#include "check.hpp"

namespace lily::test {
namespace {

template <class T>
std::vector<T> read_array(const std::string& path) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  if (!file) fail(__FILE__, __LINE__, path + " cannot be read");
  std::vector<T> values(size_t(file.tellg()) / sizeof(T));
  file.seekg(0);
  file.read(reinterpret_cast<char*>(values.data()), std::streamsize(values.size() * sizeof(T)));
  return values;
}

void set_field(ModelSpec& spec, const std::string& name, double value) {
  const std::map<std::string, uint32_t*> integers = {
      {"hidden_size", &spec.hidden_size}, {"num_layers", &spec.num_layers}, {"vocab_size", &spec.vocab_size},
      {"num_attention_heads", &spec.num_attention_heads}, {"num_kv_heads", &spec.num_kv_heads}, {"head_dim", &spec.head_dim}, {"rotary_dim", &spec.rotary_dim},
      {"linear_num_key_heads", &spec.linear_num_key_heads}, {"linear_num_value_heads", &spec.linear_num_value_heads},
      {"linear_key_head_dim", &spec.linear_key_head_dim}, {"linear_value_head_dim", &spec.linear_value_head_dim}, {"conv_kernel", &spec.conv_kernel},
      {"num_experts", &spec.num_experts}, {"experts_per_token", &spec.experts_per_token}, {"moe_intermediate_size", &spec.moe_intermediate_size},
      {"shared_intermediate_size", &spec.shared_intermediate_size}, {"intermediate_size", &spec.intermediate_size}, {"max_context", &spec.max_context}};
  if (auto found = integers.find(name); found != integers.end())
    *found->second = uint32_t(value);
  else if (name == "rope_theta")
    spec.rope_theta = value;
  else if (name == "rms_norm_eps")
    spec.rms_norm_eps = value;
  else if (name == "tied")
    spec.tied = value != 0;
  else
    fail(__FILE__, __LINE__, "the spec has no field named " + name);
}

uint32_t format_kind(const std::string& format) {
  if (format == "affine") return LILY_W_AFFINE;
  if (format == "bf16") return LILY_W_BF16;
  return format == "f16" ? LILY_W_F16 : LILY_W_F32;
}

Prompt read_prompt(const std::string& directory, uint32_t length, uint32_t rows) {
  auto path = [&](const char* name) { return directory + "/" + name + "_" + std::to_string(length) + ".bin"; };
  return {read_array<int32_t>(path("prompt")), read_array<int32_t>(path("greedy")), read_array<float>(path("logits")), rows};
}

Fixture read_fixture(const std::string& name) {
  const std::string directory = data_directory() + "/" + name;
  std::ifstream file(directory + "/model.txt");
  if (!file) fail(__FILE__, __LINE__, directory + "/model.txt cannot be read");
  Fixture f;
  f.name = name;
  for (std::string line, kind; std::getline(file, line);) {
    std::istringstream words(line);
    words >> kind;
    if (kind == "spec") {
      std::string field;
      double value;
      words >> field >> value;
      set_field(f.spec, field, value);
    } else if (kind == "layers") {
      for (int type; words >> type;) f.spec.layer_types.push_back(uint8_t(type));
    } else if (kind == "linear") {
      WeightSource w;
      std::string format;
      w.linear = true;
      words >> w.name >> w.rows >> w.cols >> w.experts >> w.expert_stride >> format >> w.format.bits >> w.format.group;
      w.format.kind = format_kind(format);
      f.weights.push_back(w);
    } else if (kind == "vector") {
      WeightSource w;
      std::string dtype;
      words >> w.name >> dtype >> w.elements >> w.add_one;
      w.dtype = dtype == "bf16" ? DType::bf16 : dtype == "f16" ? DType::f16 : DType::f32;
      f.weights.push_back(w);
    } else if (kind == "part") {
      std::string part;
      PartSource p;
      words >> part >> p.offset >> p.bytes >> p.file_bytes >> std::ws;
      std::getline(words, p.file);
      f.weights.back().parts[part] = p;
    } else if (kind == "prompt") {
      uint32_t length, rows;
      words >> length >> rows;
      f.prompts[length] = read_prompt(directory, length, rows);
    }
    CHECK(!words.bad());
  }
  return f;
}

}  // namespace

std::string& data_directory() {
  static std::string directory;
  return directory;
}

const Fixture& fixture(const std::string& name) {
  static std::map<std::string, Fixture> known;
  auto found = known.find(name);
  return found != known.end() ? found->second : known[name] = read_fixture(name);
}

std::vector<float> logits(Session& s) {
  std::vector<float> out(s.engine()->model().spec.vocab_size);
  s.logits(out.data(), nullptr);
  return out;
}

Ids generate(const std::shared_ptr<Session>& s, uint64_t n) {
  Decoder decoder(s, {}, n);
  Ids ids;
  while (auto token = decoder.next(nullptr, 0, nullptr)) ids.push_back(token->token);
  return ids;
}

Ids joined(Ids a, const Ids& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

Environment::Environment(const char* name, const char* value) : name(name), had(std::getenv(name) != nullptr) {
  if (had) before = std::getenv(name);
  setenv(name, value, 1);
}

Environment::~Environment() {
  if (had)
    setenv(name, before.c_str(), 1);
  else
    unsetenv(name);
}

}  // namespace lily::test
