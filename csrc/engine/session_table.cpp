#include "engine/session_table.hpp"

#include "engine/session.hpp"

namespace lily {

void SessionTable::add(Session* session) {
  std::lock_guard<std::mutex> lock(mutex_);
  all_.insert(session);
}

void SessionTable::remove(Session* session) {
  std::lock_guard<std::mutex> lock(mutex_);
  all_.erase(session);
}

void SessionTable::keep(const std::shared_ptr<Session>& session) {
  std::list<std::weak_ptr<Session>> gone;
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto at = kept_.begin(); at != kept_.end();) {
    auto next = std::next(at);
    const bool same = !at->owner_before(session) && !session.owner_before(*at);
    if (same || at->expired()) gone.splice(gone.end(), kept_, at);
    at = next;
  }
  kept_.push_back(session);
}

bool SessionTable::evict_one() {
  std::vector<std::weak_ptr<Session>> order;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    order.assign(kept_.begin(), kept_.end());
  }
  // Without the table's lock: a session that goes takes itself out of the table.
  for (const auto& kept : order)
    if (std::shared_ptr<Session> session = kept.lock(); session && session->evict()) return true;
  return false;
}

bool SessionTable::drop_snapshot() {
  std::set<const BufferPtr*> current;
  std::vector<const BufferPtr*> most;
  std::lock_guard<std::mutex> lock(mutex_);
  for (const Session* session : all_) current.insert(session->holdings().state);
  for (const Session* session : all_) {
    std::vector<const BufferPtr*> snapshots = session->holdings().snapshots;
    std::erase_if(snapshots, [&](const BufferPtr* state) { return current.count(state) > 0; });
    if (snapshots.size() > most.size()) most = std::move(snapshots);
  }
  if (most.empty()) return false;
  for (Session* session : all_) session->drop_snapshots(most.front());
  return true;
}

uint64_t SessionTable::snapshot_states() const {
  std::set<const BufferPtr*> current, snapshots;
  std::lock_guard<std::mutex> lock(mutex_);
  for (const Session* session : all_) {
    const Session::Holdings held = session->holdings();
    current.insert(held.state);
    snapshots.insert(held.snapshots.begin(), held.snapshots.end());
  }
  for (const BufferPtr* state : current) snapshots.erase(state);
  return snapshots.size();
}

Session::View Session::view() const {
  std::lock_guard<std::mutex> lock(content_);
  View v{tokens_, origins_, tokens_.size() > consumed_, 0, {}};
  for (const Snapshot& s : snapshots_) v.snapshots.push_back(s.position);
  v.nbytes = uint64_t(blocks_.size()) * engine_->model().kv_block_bytes() * 2 * engine_->model().spec.attention_layers() + tokens_.size() * (sizeof(int32_t) + sizeof(Origin));
  bool counted = !state_ || (!snapshots_.empty() && snapshots_.back().state == state_);
  v.nbytes += (snapshots_.size() + !counted) * engine_->state_bytes();
  return v;
}

Session::Holdings Session::holdings() const {
  std::lock_guard<std::mutex> lock(content_);
  Holdings held{state_.get(), {}, {}, tokens_.size()};
  for (const Snapshot& s : snapshots_) held.snapshots.push_back(s.state.get());
  for (const KvBlockPtr& block : blocks_) held.blocks.push_back(block.get());
  return held;
}

bool Session::evict() {
  if (busy_.exchange(true)) return false;
  const bool first = !evicted_.exchange(true);
  {
    std::lock_guard<std::mutex> lock(content_);
    tokens_.clear();
    origins_.clear();
    consumed_ = 0;
    state_ = nullptr;
    snapshots_.clear();
    blocks_.clear();
    table_ = nullptr;
  }
  busy_ = false;
  return first;
}

uint64_t held_bytes(const std::vector<std::shared_ptr<Session>>& sessions) {
  std::set<const BufferPtr*> states;
  std::set<const KvBlock*> blocks;
  uint64_t bytes = 0;
  for (const auto& session : sessions) {
    const Session::Holdings held = session->holdings();
    if (held.state) states.insert(held.state);
    states.insert(held.snapshots.begin(), held.snapshots.end());
    blocks.insert(held.blocks.begin(), held.blocks.end());
    bytes += held.tokens * (sizeof(int32_t) + sizeof(Origin));
  }
  if (sessions.empty()) return 0;
  const Engine& engine = *sessions.front()->engine();
  const Model& model = engine.model();
  return bytes + states.size() * engine.state_bytes() + blocks.size() * model.kv_block_bytes() * 2 * model.spec.attention_layers();
}

}  // namespace lily
