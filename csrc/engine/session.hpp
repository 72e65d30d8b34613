// A session: tokens, the state after the consumed ones, and the K/V blocks behind them. It moves forward on success only.
#pragma once
#include <atomic>
#include <memory>
#include <vector>

#include "engine/engine.hpp"

namespace lily {

enum class Origin : uint8_t { read = 0, generated = 1 };

// A state that the session can go back to: the recurrent part of the model cannot be cut back.
struct Snapshot {
  uint32_t position;  // tokens consumed
  StatePtr state;
  bool marked;  // asked for by the caller, or the end of a prompt; else one of every kSnapshotInterval tokens
};

struct Rewind {
  uint32_t kept, reread;  // tokens whose state was still there, and tokens computed again
};

struct SessionImage;

class Session {
 public:
  static constexpr uint32_t kSnapshotInterval = 1024;
  static constexpr size_t kMarkedSnapshots = 8;  // so many of the newest stay, and few of the others
  static constexpr uint32_t kNearTokens = 16;  // the opening of an answer is shorter

  explicit Session(std::shared_ptr<Engine> engine);
  ~Session();
  Session(const Session&) = delete;

  using Progress = std::function<void(uint64_t done, uint64_t total)>;
  // Reads ids in chunks, after decoding a pending token. Whole chunks read before an error or an interrupt stay, with their snapshots.
  // marks: ascending numbers of ids (1 to n-1) after which a snapshot is kept besides the regular ones.
  // keep_end: a snapshot is kept at the end too, as for a whole prompt; a piece of one needs none.
  void append(const int32_t* ids, size_t n, const Progress& progress, const Interrupt& interrupt, const std::vector<uint32_t>& marks = {}, bool keep_end = true);
  // Back to the first n tokens: from the newest snapshot at or before n, the rest is computed again as it was, read or generated.
  // On an error or an interrupt the session stays as it is.
  Rewind rewind(uint32_t n, const Progress& progress, const Interrupt& interrupt);
  enum class Rows { logits, score };
  // As append; out is [n, vocab] logits, or [n] log probabilities of the next id (0 for the last).
  void append_rows(const int32_t* ids, size_t n, Rows mode, float* out, const Progress& progress, const Interrupt& interrupt);
  void logits(float* out, const Interrupt& interrupt);  // [vocab], decodes a pending token first
  std::shared_ptr<Session> fork();
  // Outputs of every traced dispatch while ids are read in one chunk by the unfused plan; the session itself does not move.
  using TraceSink = std::function<void(const TraceTag&, const uint8_t* data, uint64_t bytes)>;
  void trace(const int32_t* ids, size_t n, const TraceSink& sink);

  // A consistent copy of what the session holds, also while another thread works on it. The accessors below are for the thread that works.
  struct View {
    std::vector<int32_t> tokens;
    std::vector<Origin> origins;
    bool pending;
    uint64_t nbytes;
    std::vector<uint32_t> snapshots;  // positions
  };
  View view() const;
  // What it holds, by identity; for counting.
  struct Holdings {
    const BufferPtr* state;  // null before the first token
    std::vector<const BufferPtr*> snapshots;
    std::vector<const KvBlock*> blocks;
    size_t tokens;
  };
  Holdings holdings() const;
  void drop_snapshots(const BufferPtr* state);  // those of this value, from any thread
  // Lets go of everything, for good, unless it is in use; then false, as for one that was evicted before.
  bool evict();
  bool evicted() const { return evicted_.load(); }
  const std::vector<int32_t>& tokens() const { return tokens_; }
  const std::vector<Origin>& origins() const { return origins_; }
  bool pending() const { return tokens_.size() > consumed_; }
  uint32_t consumed() const { return consumed_; }
  const StatePtr& state() const { return state_; }
  const std::vector<KvBlockPtr>& kv_blocks() const { return blocks_; }
  bool busy() const { return busy_.load(); }
  const std::shared_ptr<Engine>& engine() const { return engine_; }

 private:
  friend class Decoder;
  friend struct SessionImage export_session(Session&);
  friend std::shared_ptr<Session> import_session(const std::shared_ptr<Engine>&, const struct SessionImage&);
  // Marks the session busy for its lifetime; InvalidArgument when it already is.
  struct Busy {
    explicit Busy(Session& s);
    ~Busy() { session.busy_.store(false); }
    Session& session;
  };
  void check_ids(const int32_t* ids, size_t n) const;
  void reserve(uint32_t end);  // K/V blocks for positions below end, the first one to be written unshared
  void consume_pending(const BufferPtr& logits, const Interrupt& interrupt);
  void read(const int32_t* ids, size_t n, const Progress& progress, const Interrupt& interrupt, const BufferPtr& rows_out,
            const std::function<void(uint32_t begin, uint32_t rows)>& each_chunk, const std::vector<uint32_t>& marks, bool keep_end = true);
  void commit_chunk(const int32_t* ids, uint32_t rows, const StatePtr& out, const std::vector<Snapshot>& passed, bool marked);
  void commit_generated(int32_t token, const StatePtr& out, uint32_t consumed);  // out null: nothing was consumed
  void keep_snapshot(uint32_t position, const StatePtr& state, bool marked);
  void thin_snapshots();
  StatePtr snapshot_state();  // null when the budget is full
  std::shared_ptr<Session> copy(uint32_t n_tokens, const StatePtr& state, uint32_t consumed) const;
  std::vector<Engine::Bound> common(const StatePtr& in, const StatePtr& out, const BufferPtr& step) const;
  StatePtr current() const;
  TicketPtr submit_head(const BufferPtr& step, const BufferPtr& logits, const Engine::Request& request);
  TicketPtr submit_decode(const BufferPtr& step, uint32_t position, const StatePtr& in, const StatePtr& out, const BufferPtr& logits, const Engine::Request& request);

  std::shared_ptr<Engine> engine_;
  mutable std::mutex content_;  // held for moments: commits, view(), and all that reads or changes snapshots, which other threads may drop
  std::vector<int32_t> tokens_;
  std::vector<Origin> origins_;
  uint32_t consumed_ = 0;
  StatePtr state_;  // null before the first token
  std::vector<Snapshot> snapshots_;  // ascending
  std::vector<KvBlockPtr> blocks_;
  BufferPtr table_, step_;
  std::atomic<bool> busy_{false}, evicted_{false};
};

}  // namespace lily
