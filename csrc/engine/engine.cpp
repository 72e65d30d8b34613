#include "engine/engine.hpp"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <thread>
#include <unistd.h>

#include "device/shader/estimate.hpp"

namespace lily {

std::shared_ptr<Engine> Engine::open(const ModelSpec& spec, const std::vector<WeightSource>& sources, const std::string& device_name, uint64_t memory_limit,
                                     const Progress& progress) {
  // A forked child cannot stop threads that it does not have: there the engine is left as it is.
  std::shared_ptr<Engine> e(new Engine(), [](Engine* p) {
    if (!p->forked()) delete p;
  });
  e->policy_ = Policy::from_environment();
  if (const char* text = std::getenv("LILY_SCHEDULE"); text && *text) e->schedule_ = Schedule::parse(text);
  e->device_ = open_device(device_name);
  e->policy_.traits = e->device_->traits();
  e->model_ = std::make_unique<Model>(spec, sources, e->device_->storage());
  e->chunk_ = default_chunk(*e->model_, e->policy_);
  uint64_t limit = memory_limit ? memory_limit : std::max<uint64_t>(e->device_->info().memory_bytes, 1);
  e->budget_ = std::make_shared<MemoryBudget>(limit);

  // Refused before anything is read: weights, three states in circulation, one K/V growth step, a small chunk.
  const Model& m = *e->model_;
  uint64_t least = m.weights.bytes() + 3 * m.state.bytes + 4 * LILY_KV_BLOCK * m.kv_bytes_per_token() + e->record({ProgramKey::prefill, 16}, e->policy_).workspace_bytes();
  if (least > limit)
    throw OutOfMemoryError("the model does not fit in the memory limit of " + std::to_string(limit) + " bytes", least, limit,
                           (memory_limit ? "raise memory_limit, or " : "") + std::string("load a smaller or more strongly quantised checkpoint") + e->device_->info().advice);
  e->budget_->reserve(MemoryKind::weights, m.weights.bytes());
  auto fixed = std::make_shared<Bindings>(m.use.step);  // weights have the first symbols
  m.weights.load(*e->device_, *fixed, [&](uint64_t done, uint64_t total) {
    if (progress) progress("load", done, total);
  });
  e->fixed_ = fixed;
  e->states_ = std::make_shared<StatePool>(e->device_, e->budget_, m.state.bytes);
  e->kv_ = std::make_shared<KvCache>(e->device_, e->budget_, m.spec.attention_layers(), m.kv_block_bytes(), [raw = e.get()] { raw->drain(); });
  e->budget_->set_make_room([raw = e.get()](Need need) { return raw->make_room(need); });
  return e;
}

Engine::Engine() : process_(int(getpid())) {}

Engine::~Engine() {
  if (device_) drain();
}

bool Engine::forked() const { return int(getpid()) != process_; }

void Engine::refuse_fork() const {
  if (forked()) throw DeviceError("this model was loaded before a fork and its threads exist in the parent only; load the model in the child process");
}

void Engine::drain() {
  refuse_fork();
  while (device_->in_flight() > 0) std::this_thread::sleep_for(std::chrono::microseconds(200));
}

void Engine::set_chunk(uint32_t rows) {
  if (rows < 1 || rows > kMaxChunk) throw InvalidArgument("chunk is " + std::to_string(rows) + ", expected 1 to " + std::to_string(kMaxChunk));
  chunk_ = rows;
}

uint32_t Engine::default_chunk(const Model& model, const Policy& policy) {
  constexpr double kLongest = 0.95;  // seconds of a stage
  uint32_t chunk = kDefaultChunk;
  if (!policy.traits.tile_map) return chunk;
  auto longest = [&] {
    const Program p = model.prefill(chunk, false, chunk, policy);
    return std::ranges::max(estimate_stages(p.dispatches(), p.stages()));
  };
  while (chunk > 256 && longest() > kLongest) chunk /= 2;
  return chunk;
}

uint32_t Engine::cut_context(uint32_t rows, uint32_t tokens) const {
  return dispatch_key_blocks(policy_.traits, rows) * LILY_KV_BLOCK * attention_parts(policy_.traits, rows, tokens);
}

uint32_t Engine::fitting_chunk(size_t tokens, size_t rows) {
  std::lock_guard lock(mutex_);
  // Arenas grow by doubling from four blocks.
  const uint64_t blocks = std::bit_ceil(std::max<uint64_t>(4, (tokens + rows + LILY_KV_BLOCK - 1) / LILY_KV_BLOCK));
  const uint64_t arenas = blocks * LILY_KV_BLOCK * model_->kv_bytes_per_token(), grown = budget_->used(MemoryKind::kv);
  const uint64_t request = 8ull * (model_->spec.vocab_size + chunk_) + 16384;  // ids, logits, settings
  const uint64_t kept = request + 3 * model_->state.bytes + (arenas > grown ? arenas - grown : 0);
  uint32_t chunk = chunk_;
  for (; chunk > 16; chunk = (chunk + 1) / 2) {
    const uint32_t bucket = row_bucket(uint32_t(std::min<size_t>(rows, chunk)), chunk);
    const uint64_t held = workspace_ ? workspace_->bytes() : 0, needed = ready({ProgramKey::prefill, bucket, false, cut_context(bucket, uint32_t(tokens + rows))}).workspace;
    if (needed <= held || needed - held + kept <= budget_->limit() - budget_->used()) break;
  }
  return chunk;
}

void Engine::set_schedule(const Schedule& schedule) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  schedule_ = schedule;
  programs_.clear();
}

MemoryReport Engine::memory() const {
  const uint64_t snapshots = sessions_.snapshot_states() * model_->state.bytes, states = budget_->used(MemoryKind::states);
  return {budget_->used(MemoryKind::weights),
          budget_->used(MemoryKind::kv),
          states - std::min(states, snapshots),
          snapshots,
          budget_->used(MemoryKind::workspace),
          budget_->used(MemoryKind::requests),
          budget_->limit(),
          model_->kv_bytes_per_token(),
          model_->state.bytes};
}

// Spare states first, then the session that was kept for reuse and not used for longest, with the arenas that it leaves empty; then the end of the arenas
// that is empty otherwise, and at last snapshots of sessions that stay: without them a rewind reads more again.
bool Engine::make_room(Need need) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (states_ && states_->trim()) return true;
  if (sessions_.evict_one()) {
    states_->trim();
    kv_->shrink();
    return true;
  }
  if (need == Need::snapshot || !kv_) return false;
  if (kv_->shrink(true)) return true;
  if (!sessions_.drop_snapshot()) return false;
  states_->trim();
  kv_->shrink(true);  // what was in its way may be gone
  return true;
}

void Engine::trim() {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  states_->trim();
  kv_->shrink();
}

uint32_t Engine::row_bucket(uint32_t rows, uint32_t chunk) {
  if (rows <= 16) return std::min(16u, std::max(chunk, rows));
  return std::max(rows, std::min(std::bit_ceil(rows), chunk));
}

Program Engine::record(const ProgramKey& key, const Policy& policy) const {
  switch (key.kind) {
    case ProgramKey::decode: return model_->decode(key.rows, policy);
    case ProgramKey::sampler: return model_->sampler();
    case ProgramKey::prefill: return model_->prefill(key.rows, key.flag, key.context, policy);
    case ProgramKey::head_rows: return model_->head_rows(key.rows, key.flag);
    default: return model_->head_step();
  }
}

const Engine::Ready& Engine::ready(const ProgramKey& key) {
  auto found = programs_.find(key);
  if (found != programs_.end()) return found->second;
  Program program = record(key, policy_);
  Stages order = program.order(schedule_);
  return programs_[key] = Ready{device_->prepare(program.dispatches(), std::move(order)), program.workspace_bytes()};
}

TicketPtr Engine::submit(const ProgramKey& asked, const std::vector<Bound>& bound, const Request& request) {
  refuse_fork();
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  ProgramKey key = asked;
  if (key.kind == ProgramKey::decode) key.rows = decode_bucket(policy_.traits, key.rows);
  if (key.kind == ProgramKey::prefill) key.context = cut_context(key.rows, key.context);
  const Ready& program = ready(key);
  // A larger workspace replaces the smaller one; submissions in flight keep theirs alive, and nothing in it outlives a submission.
  if (!workspace_ || workspace_->bytes() < program.workspace) {
    workspace_.reset();
    workspace_ = allocate_counted(device_, budget_, MemoryKind::workspace, program.workspace);
  }
  const StepSymbols& use = model_->use;
  Submission s;
  s.program = program.program;
  s.bindings = bind();
  s.bindings.set(use.workspace, {workspace_, 0});
  for (const Bound& b : bound) s.bindings.set(b.symbol, {b.buffer, b.offset});
  s.after = request.after;
  s.cancel = request.cancel;
  s.observe = request.observe;
  return device_->submit(std::move(s));
}

BindingSet Engine::bind() const {
  BindingSet bindings{fixed_, Bindings(model_->symbols.size() - fixed_->size())};
  kv_->bind(model_->use, bindings);
  return bindings;
}

BindingSet Engine::base_bindings() {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  return bind();
}

void Engine::wait(const TicketPtr& ticket, const Interrupt& interrupt, const std::shared_ptr<std::atomic<bool>>& cancel) {
  refuse_fork();
  // Polled at the start too: work made of many short submissions must hear of an interrupt as well.
  bool stopped = interrupt && interrupt();
  if (stopped && cancel) cancel->store(true);
  while (!ticket->wait_for(std::chrono::milliseconds(stopped ? 1000 : 50)))
    if (!stopped && interrupt && interrupt()) {
      stopped = true;
      if (cancel) cancel->store(true);
    }
  if (stopped) throw Interrupted();
  ticket->check();
}

}  // namespace lily
