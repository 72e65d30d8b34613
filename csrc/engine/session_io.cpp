#include "engine/session_io.hpp"

#include <cstring>

namespace lily {
namespace {

void require(bool ok, const std::string& what) {
  if (!ok) throw InvalidArgument("saved session: " + what);
}

}  // namespace

SessionImage export_session(Session& session) {
  Session::Busy busy(session);
  const Engine& engine = *session.engine_;
  const Model& model = engine.model();
  SessionImage image;
  image.tokens = session.tokens_;
  for (Origin o : session.origins_) image.origins.push_back(uint8_t(o));
  image.consumed = session.consumed_;
  std::vector<StatePtr> distinct;
  auto index = [&](const StatePtr& state) {
    for (size_t i = 0; i < distinct.size(); i++)
      if (distinct[i] == state) return uint32_t(i);
    distinct.push_back(state);
    return uint32_t(distinct.size() - 1);
  };
  std::vector<Snapshot> snapshots;
  {
    std::lock_guard<std::mutex> lock(session.content_);
    snapshots = session.snapshots_;
  }
  for (const Snapshot& s : snapshots)
    if (s.state != session.state_) image.snapshots.push_back({s.position, index(s.state), s.marked});
  if (session.state_) {
    uint32_t last = index(session.state_);
    for (const Snapshot& s : snapshots)
      if (s.state == session.state_) image.snapshots.push_back({s.position, last, s.marked});
  }
  for (const StatePtr& state : distinct) {
    image.states.emplace_back((*state)->host(), engine.state_bytes());
    image.owners.push_back(state);
  }
  KvCache& kv = session.engine_->kv();
  const uint64_t block = kv.block_bytes(), row = uint64_t(model.spec.head_dim) * dtype_bytes(model.storage);
  const size_t blocks = (size_t(session.consumed_) + LILY_KV_BLOCK - 1) / LILY_KV_BLOCK;
  const uint32_t live = session.consumed_ % LILY_KV_BLOCK;  // rows of the last block, 0: all
  std::lock_guard<std::recursive_mutex> lock(session.engine_->mutex());
  for (uint32_t layer = 0; layer < model.spec.attention_layers(); layer++)
    for (bool keys : {true, false}) {
      const uint8_t* arena = blocks ? (keys ? kv.k(layer) : kv.v(layer))->host() : nullptr;
      auto owned = std::make_shared<std::vector<uint8_t>>(blocks * block);
      std::vector<uint8_t>& bytes = *owned;
      for (size_t b = 0; b < blocks; b++) std::memcpy(bytes.data() + b * block, arena + session.blocks_[b]->index() * block, block);
      // What lies behind the last token is left over from other sessions or steps.
      if (live)
        for (uint32_t head = 0; head < model.spec.num_kv_heads; head++)
          std::memset(bytes.data() + (blocks - 1) * block + (uint64_t(head) * LILY_KV_BLOCK + live) * row, 0, (LILY_KV_BLOCK - live) * row);
      image.kv.emplace_back(bytes);
      image.owners.push_back(owned);
    }
  return image;
}

std::shared_ptr<Session> import_session(const std::shared_ptr<Engine>& engine, const SessionImage& image) {
  const Model& model = engine->model();
  const size_t n = image.tokens.size();
  require(image.origins.size() == n, "as many origins as tokens");
  require(n <= engine->max_context(), std::to_string(n) + " tokens, more than the context of " + std::to_string(engine->max_context()));
  require(image.consumed <= n && n - image.consumed <= 1, "at most one token is pending");
  require(image.states.empty() == (image.consumed == 0), "a state for the tokens consumed");
  for (size_t i = 0; i < n; i++) {
    require(image.tokens[i] >= 0 && uint32_t(image.tokens[i]) < model.spec.vocab_size, "token ids within the vocabulary");
    require(image.origins[i] <= 1, "origins are 0 or 1");
  }
  require(image.consumed == n || image.origins[n - 1] == uint8_t(Origin::generated), "a pending token was generated");
  for (const auto& state : image.states) require(state.size() == engine->state_bytes(), "states of " + std::to_string(engine->state_bytes()) + " bytes");
  uint32_t before = 0;
  for (const auto& s : image.snapshots) {
    require(s.position > before && s.position <= image.consumed && s.state < image.states.size(), "ascending snapshots within the tokens consumed");
    before = s.position;
  }
  KvCache& kv = engine->kv();
  const size_t blocks = (size_t(image.consumed) + LILY_KV_BLOCK - 1) / LILY_KV_BLOCK;
  require(image.kv.size() == size_t(2) * model.spec.attention_layers(), "K and V of every attention layer");
  for (const auto& bytes : image.kv) require(bytes.size() == blocks * kv.block_bytes(), "whole K/V blocks");

  auto session = std::make_shared<Session>(engine);
  std::vector<StatePtr> states;
  for (const auto& bytes : image.states) {
    StatePtr state = engine->new_state();
    std::memcpy((*state)->host(), bytes.data(), bytes.size());
    states.push_back(state);
  }
  session->reserve(image.consumed);
  {
    std::lock_guard<std::mutex> lock(session->content_);
    session->tokens_ = image.tokens;
    for (uint8_t o : image.origins) session->origins_.push_back(Origin(o));
    session->consumed_ = image.consumed;
    if (!states.empty()) session->state_ = states.back();
    for (const auto& s : image.snapshots) session->snapshots_.push_back({s.position, states[s.state], s.marked});
  }
  std::lock_guard<std::recursive_mutex> lock(engine->mutex());
  for (size_t i = 0; i < image.kv.size(); i++) {
    uint8_t* arena = blocks ? (i % 2 ? kv.v(uint32_t(i / 2)) : kv.k(uint32_t(i / 2)))->host() : nullptr;
    for (size_t b = 0; b < blocks; b++) std::memcpy(arena + session->blocks_[b]->index() * kv.block_bytes(), image.kv[i].data() + b * kv.block_bytes(), kv.block_bytes());
  }
  return session;
}

}  // namespace lily
