// A small checkpoint with its prompts and reference outputs, as describe.py wrote it, and the engine opened on it.
#pragma once
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "engine/decoder.hpp"

namespace lily::test {

std::string& data_directory();

struct Prompt {
  std::vector<int32_t> ids, greedy;  // greedy: what the float32 reference continues with
  std::vector<float> logits;         // of the last `rows` positions
  uint32_t rows = 0;
};

struct Fixture {
  std::string name;
  ModelSpec spec;
  std::vector<WeightSource> weights;
  std::map<uint32_t, Prompt> prompts;  // by their length

  std::shared_ptr<Engine> open(const std::string& device, uint64_t memory_limit = 0) const { return Engine::open(spec, weights, device, memory_limit, nullptr); }
};

// Read once. Names: those of the directories under DATA_DIR.
const Fixture& fixture(const std::string& name);
inline const char* const kMoe = "a_moe_q4g64";
inline const char* const kDense = "c_dense_q4g64_tied";

using Ids = std::vector<int32_t>;

inline void append(Session& s, const Ids& ids) { s.append(ids.data(), ids.size(), nullptr, nullptr); }
std::vector<float> logits(Session& s);
// Up to n tokens, greedily; the decoder is closed afterwards.
Ids generate(const std::shared_ptr<Session>& s, uint64_t n);
inline Ids part(const Ids& ids, size_t begin, size_t end) { return {ids.begin() + long(begin), ids.begin() + long(end)}; }
Ids joined(Ids a, const Ids& b);

// Sets an environment variable for a scope.
struct Environment {
  Environment(const char* name, const char* value);
  ~Environment();
  const char* name;
  std::string before;
  bool had;
};

}  // namespace lily::test
