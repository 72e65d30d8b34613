// A loaded model on a device: its programs, pools and memory. Sessions and decoders work through it; any thread may call, the device runs
// submissions one after another.
#pragma once
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine/pools.hpp"
#include "engine/session_table.hpp"
#include "engine/stage_clock.hpp"

namespace lily {

// Polled while waiting; true means: stop this work (the user pressed Ctrl-C).
using Interrupt = std::function<bool()>;

// Thrown after an interrupt, when everything in flight has been drained.
struct Interrupted : Error {
  Interrupted() : Error("interrupted") {}
};

struct MemoryReport {
  uint64_t weights, kv, states, snapshots, workspace, requests, limit, kv_bytes_per_token, state_bytes;
};

class Engine : public std::enable_shared_from_this<Engine> {
 public:
  using Progress = std::function<void(const char* stage, uint64_t done, uint64_t total)>;
  static std::shared_ptr<Engine> open(const ModelSpec& spec, const std::vector<WeightSource>& sources, const std::string& device, uint64_t memory_limit, const Progress& progress);
  ~Engine();
  bool forked() const;  // in a child process, where the device's threads do not exist

  const Model& model() const { return *model_; }
  const DevicePtr& device() const { return device_; }
  uint32_t max_context() const { return model_->spec.max_context; }
  uint32_t chunk() const { return chunk_; }
  const Policy& policy() const { return policy_; }
  // Rows to read at once of `rows` more after `tokens`: chunk(), halved until its workspace fits in the budget beside the keys and values of all of them.
  // The numbers do not depend on it.
  uint32_t fitting_chunk(size_t tokens, size_t rows);
  void set_chunk(uint32_t rows);
  void set_schedule(const Schedule& schedule);
  MemoryReport memory() const;
  bool fused() const { return policy_.fused; }
  SessionTable& sessions() { return sessions_; }
  void trim();  // gives back what no session holds
  bool regular_snapshots() const { return regular_snapshots_; }
  void set_regular_snapshots(bool on) { regular_snapshots_ = on; }  // for measuring what they cost

  // Programs by what changes their shape. Recorded and prepared on first use.
  struct ProgramKey {
    enum Kind { decode, sampler, prefill, head_rows, head_step } kind;
    uint32_t rows = 1;  // prefill and head: row bucket; decode: context tokens
    bool flag = false;  // prefill: all rows; head: score
    uint32_t context = 0;  // prefill: tokens that its last row may see
    auto operator<=>(const ProgramKey&) const = default;
  };
  Program record(const ProgramKey& key, const Policy& policy) const;

  // Dynamic bindings of one submission, on top of weights, K/V arenas and workspace.
  struct Bound {
    Symbol symbol;
    BufferPtr buffer;
    uint64_t offset = 0;
  };
  struct Request {
    TicketPtr after;
    std::shared_ptr<std::atomic<bool>> cancel;
    std::function<void(const Dispatch&, const BindingSet&)> observe;
  };
  TicketPtr submit(const ProgramKey& key, const std::vector<Bound>& bound, const Request& request);
  // Waits, polling `interrupt`; on an interrupt sets `cancel`, waits for the end and throws Interrupted. Throws what the ticket holds.
  void wait(const TicketPtr& ticket, const Interrupt& interrupt, const std::shared_ptr<std::atomic<bool>>& cancel);

  StatePtr new_state(Need need = Need::work) { return states_->acquire(need); }
  StatePtr zero_state() { return states_->zero(); }
  BufferPtr request_buffer(uint64_t bytes) { return allocate_counted(device_, budget_, MemoryKind::requests, bytes); }
  uint64_t state_bytes() const { return states_->bytes(); }
  KvCache& kv() { return *kv_; }
  std::recursive_mutex& mutex() { return mutex_; }
  BindingSet base_bindings();  // weights and K/V arenas; takes mutex()
  void drain();  // until nothing is in flight

  void start_clock();
  std::vector<TimedProgram> stop_clock();  // InvalidArgument when none runs

  static uint32_t row_bucket(uint32_t rows, uint32_t chunk);
  static constexpr uint32_t kDefaultChunk = 2048;  // every sweep over the weights serves so many rows
  // kDefaultChunk, or less for a wide model on a GPU: no stage may take longer than a second on the smallest one.
  static uint32_t default_chunk(const Model& model, const Policy& policy);

 private:
  Engine();
  struct Ready {
    PreparedPtr program;
    uint64_t workspace;
  };
  void refuse_fork() const;
  uint32_t cut_context(uint32_t rows, uint32_t tokens) const;  // one value, and so one program, for all contexts whose prefill attention is cut alike
  bool make_room(Need need);
  BindingSet bind() const;
  const Ready& ready(const ProgramKey& key);

  const int process_;
  std::unique_ptr<Model> model_;
  DevicePtr device_;
  std::shared_ptr<MemoryBudget> budget_;
  std::shared_ptr<StatePool> states_;
  std::shared_ptr<KvCache> kv_;
  std::shared_ptr<const Bindings> fixed_;  // weights
  Policy policy_;
  Schedule schedule_;
  uint32_t chunk_ = kDefaultChunk;
  bool regular_snapshots_ = true;
  SessionTable sessions_;
  std::recursive_mutex mutex_;  // programs, workspace, K/V allocation, order of submissions; an allocation under it may make room
  std::map<ProgramKey, Ready> programs_;
  BufferPtr workspace_;
  std::shared_ptr<StageClock> clock_;
};

}  // namespace lily
