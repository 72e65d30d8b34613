// All sessions of an engine: what they hold, and which of them may be let go of when memory is short.
#pragma once
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

namespace lily {

class Session;

class SessionTable {
 public:
  void add(Session* session);
  void remove(Session* session);
  // Kept for reuse only: memory that runs short is taken from the one whose last call is the longest ago.
  void keep(const std::shared_ptr<Session>& session);
  bool evict_one();  // false when no kept session can be let go of; one in use cannot
  // Of the session that has most of them, its oldest, wherever else it is held; false when nobody has any that it does not stand at.
  bool drop_snapshot();
  // Distinct state values that snapshots hold and no session stands at.
  uint64_t snapshot_states() const;

 private:
  mutable std::mutex mutex_;
  std::set<Session*> all_;
  std::list<std::weak_ptr<Session>> kept_;  // the least recently used first
};

// Bytes of states, K and V and tokens, each counted once, however many of the sessions share it.
uint64_t held_bytes(const std::vector<std::shared_ptr<Session>>& sessions);

}  // namespace lily
