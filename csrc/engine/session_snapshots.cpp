// What a session keeps of its past: snapshots of the state, forks that share it, and the way back to an earlier token.
#include <algorithm>
#include <bit>

#include "engine/session.hpp"

namespace lily {

void Session::keep_snapshot(uint32_t position, const StatePtr& state, bool marked) {
  auto at = std::lower_bound(snapshots_.begin(), snapshots_.end(), position, [](const Snapshot& s, uint32_t p) { return s.position < p; });
  if (at != snapshots_.end() && at->position == position)
    at->marked |= marked;
  else
    snapshots_.insert(at, {position, state, marked});
  thin_snapshots();
}

void Session::drop_snapshots(const BufferPtr* state) {
  std::lock_guard<std::mutex> lock(content_);
  std::erase_if(snapshots_, [&](const Snapshot& s) { return s.state.get() == state; });
}

// For a state that is kept on the way: a prompt that is read without it is better than none.
StatePtr Session::snapshot_state() {
  try {
    return engine_->new_state(Need::snapshot);
  } catch (const OutOfMemoryError&) {
    return nullptr;
  }
}

// Marked ones: the newest few, the first, and between them one for each doubling of the distance from the end. Regular ones: an older one must sit on a
// coarser grid. The number of both grows with the logarithm of the length.
void Session::thin_snapshots() {
  const uint32_t newest = snapshots_.empty() ? 0 : snapshots_.back().position;
  const auto first = std::find_if(snapshots_.begin(), snapshots_.end(), [](const Snapshot& s) { return s.marked; });
  const uint32_t head = first != snapshots_.end() ? first->position : 0;
  // Where there are too many, the end of an older prompt goes first: it lies a few tokens behind the mark before its answer.
  size_t total = size_t(std::count_if(snapshots_.begin(), snapshots_.end(), [](const Snapshot& s) { return s.marked; }));
  uint32_t before = UINT32_MAX;
  for (size_t i = 0; i + 1 < snapshots_.size() && total > kMarkedSnapshots + 1; i++) {
    Snapshot& s = snapshots_[i];
    if (!s.marked) continue;
    if (before != UINT32_MAX && s.position - before <= kNearTokens) {
      s.marked = false;
      total--;
    } else {
      before = s.position;
    }
  }
  size_t marked = 0;
  uint32_t kept = newest;
  for (size_t i = snapshots_.size(); i-- > 0;) {
    Snapshot& s = snapshots_[i];
    if (s.marked && ++marked > kMarkedSnapshots && s.position != head && kept - s.position < newest - kept) s.marked = false;
    if (s.marked) {
      kept = s.position;
      continue;
    }
    uint32_t step = s.position / kSnapshotInterval;
    bool regular = s.position % kSnapshotInterval == 0 && step > 0;
    uint64_t reach = regular ? uint64_t(4 * kSnapshotInterval) << std::countr_zero(step) : 0;
    if (newest - s.position > reach || !regular) snapshots_.erase(snapshots_.begin() + long(i));
  }
}

std::shared_ptr<Session> Session::copy(uint32_t n_tokens, const StatePtr& state, uint32_t consumed) const {
  auto other = std::make_shared<Session>(engine_);
  const std::scoped_lock lock(content_, other->content_);  // the table knows both
  other->tokens_.assign(tokens_.begin(), tokens_.begin() + n_tokens);
  other->origins_.assign(origins_.begin(), origins_.begin() + n_tokens);
  other->consumed_ = consumed;
  other->state_ = state;
  size_t blocks = (size_t(consumed) + LILY_KV_BLOCK - 1) / LILY_KV_BLOCK;
  other->blocks_.assign(blocks_.begin(), blocks_.begin() + long(blocks));
  for (const Snapshot& s : snapshots_)
    if (s.position <= consumed) other->snapshots_.push_back(s);
  return other;
}

Rewind Session::rewind(uint32_t n, const Progress& progress, const Interrupt& interrupt) {
  Busy busy(*this);
  if (n > tokens_.size()) throw InvalidArgument("rewind(" + std::to_string(n) + ") on a session of " + std::to_string(tokens_.size()) + " tokens");
  if (n == tokens_.size()) return {n, 0};
  uint32_t start = 0;
  StatePtr state;
  {
    std::lock_guard<std::mutex> lock(content_);
    for (const Snapshot& s : snapshots_)
      if (s.position <= n) start = s.position, state = s.state;
  }
  if (consumed_ <= n) start = consumed_, state = state_;  // only a pending token is dropped
  // The work is done on a copy that shares all blocks, and taken over when it has succeeded.
  std::shared_ptr<Session> other = copy(start, state, start);
  for (uint32_t at = start; at < n;) {
    uint32_t end = at;
    while (end < n && origins_[end] == origins_[at]) end++;
    if (origins_[at] == Origin::read) {
      Progress part;
      if (progress) part = [&](uint64_t done, uint64_t) { progress(at - start + done, n - start); };
      other->read(tokens_.data() + at, end - at, part, interrupt, nullptr, nullptr, {});
    } else {
      BufferPtr logits = engine_->request_buffer(uint64_t(engine_->model().spec.vocab_size) * 4);
      for (uint32_t i = at; i < end; i++) {
        other->commit_generated(tokens_[i], nullptr, 0);
        other->consume_pending(logits, interrupt);
        if (progress) progress(i + 1 - start, n - start);
      }
    }
    at = end;
  }
  const std::scoped_lock lock(content_, other->content_);
  tokens_ = std::move(other->tokens_);
  origins_ = std::move(other->origins_);
  consumed_ = other->consumed_;
  state_ = other->state_;
  blocks_ = std::move(other->blocks_);
  snapshots_ = std::move(other->snapshots_);
  table_ = other->table_;
  return {start, n - start};
}

std::shared_ptr<Session> Session::fork() {
  Busy busy(*this);
  return copy(uint32_t(tokens_.size()), state_, consumed_);
}

}  // namespace lily
