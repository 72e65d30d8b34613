#include "engine/session.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

namespace lily {

Session::Session(std::shared_ptr<Engine> engine) : engine_(std::move(engine)) {
  step_ = engine_->request_buffer(sizeof(LilyStep));
  engine_->sessions().add(this);
}

Session::~Session() { engine_->sessions().remove(this); }

Session::Busy::Busy(Session& s) : session(s) {
  if (s.busy_.exchange(true)) throw InvalidArgument("session is busy: another call or an open stream uses it; fork() it to work in parallel");
  if (s.evicted_) {
    s.busy_ = false;
    throw InvalidArgument("the session was let go of because memory ran short");
  }
}

void Session::check_ids(const int32_t* ids, size_t n) const {
  if (n == 0) throw InvalidArgument("no token ids: the prompt is empty");
  const uint32_t V = engine_->model().spec.vocab_size;
  for (size_t i = 0; i < n; i++)
    if (ids[i] < 0 || uint32_t(ids[i]) >= V)
      throw InvalidArgument("token id " + std::to_string(ids[i]) + " at index " + std::to_string(i) + " is outside the vocabulary of " + std::to_string(V));
  if (tokens_.size() + n > engine_->max_context()) throw ContextOverflowError(tokens_.size() + n, engine_->max_context());
}

StatePtr Session::current() const { return state_ ? state_ : engine_->zero_state(); }

void Session::reserve(uint32_t end) {
  std::lock_guard<std::recursive_mutex> lock(engine_->mutex());
  KvCache& kv = engine_->kv();
  const size_t needed = (size_t(end) + LILY_KV_BLOCK - 1) / LILY_KV_BLOCK, first = consumed_ / LILY_KV_BLOCK;
  if (needed > blocks_.size()) kv.prepare(uint32_t(needed - blocks_.size()));
  // Everything is allocated before anything of the session changes: an allocation that fails leaves it as it was.
  std::vector<KvBlockPtr> blocks = blocks_;
  bool copied = first < blocks.size() && blocks_[first].use_count() > 2;  // more than blocks_ and the local copy: shared with a fork
  if (copied) blocks[first] = kv.allocate();
  while (blocks.size() < needed) blocks.push_back(kv.allocate());
  size_t had = blocks_.size();
  BufferPtr table = table_;
  if (!table || table->bytes() < blocks.size() * 4) {
    table = engine_->request_buffer(std::max<size_t>(16, blocks.size() * 2) * 4);
    had = 0;
  }
  // The block that the next row goes into is copied first. Entries already there are read by steps in flight and are not touched.
  if (copied) kv.copy(blocks_[first]->index(), blocks[first]->index());
  uint32_t* entries = reinterpret_cast<uint32_t*>(table->host());
  if (copied) entries[first] = blocks[first]->index();
  for (size_t i = had; i < blocks.size(); i++) entries[i] = blocks[i]->index();
  std::lock_guard<std::mutex> reading(content_);
  blocks_.swap(blocks);
  table_ = table;
}

std::vector<Engine::Bound> Session::common(const StatePtr& in, const StatePtr& out, const BufferPtr& step) const {
  const StepSymbols& use = engine_->model().use;
  return {{use.step, step}, {use.table, table_}, {use.state_in, *in}, {use.state_out, *out}};
}

TicketPtr Session::submit_decode(const BufferPtr& step, uint32_t position, const StatePtr& in, const StatePtr& out, const BufferPtr& logits, const Engine::Request& request) {
  auto* record = reinterpret_cast<LilyStep*>(step->host());
  record->position = position;
  record->rows = 1;
  record->n_snapshots = 0;
  auto bound = common(in, out, step);
  bound.push_back({engine_->model().use.logits, logits});
  return engine_->submit({Engine::ProgramKey::decode, position + 1}, bound, request);
}

TicketPtr Session::submit_head(const BufferPtr& step, const BufferPtr& logits, const Engine::Request& request) {
  const StepSymbols& use = engine_->model().use;
  auto* record = reinterpret_cast<LilyStep*>(step->host());
  record->rows = 1;
  record->position = consumed_ - 1;
  // The last consumed token's origin decides whose arithmetic the head follows.
  bool read = origins_[consumed_ - 1] == Origin::read;
  Engine::ProgramKey key{read ? Engine::ProgramKey::head_rows : Engine::ProgramKey::head_step, read ? 16u : 1u};
  return engine_->submit(key, {{use.step, step}, {use.hidden_in, *state_, engine_->model().state.hidden}, {use.logits, logits}}, request);
}

void Session::consume_pending(const BufferPtr& logits, const Interrupt& interrupt) {
  if (!pending()) return;
  reserve(consumed_ + 1);
  auto cancel = std::make_shared<std::atomic<bool>>(false);
  StatePtr in = current(), out = engine_->new_state();
  reinterpret_cast<LilyStep*>(step_->host())->token = uint32_t(tokens_[consumed_]);
  engine_->wait(submit_decode(step_, consumed_, in, out, logits, {nullptr, cancel, nullptr}), interrupt, cancel);
  std::lock_guard<std::mutex> lock(content_);
  state_ = out;
  consumed_++;
}

namespace {

// A row of the next chunk after which the state is kept.
struct Stop {
  uint32_t after;  // rows of the chunk
  bool marked;
};

// Marks and regular positions in the `rows` tokens after `position`, ascending. A chunk carries LILY_MAX_SNAPSHOTS of them besides the one at its end; where
// there are more, `rows` is cut at the next.
std::vector<Stop> stops_within(uint32_t position, uint32_t begin, const std::vector<uint32_t>& marks, bool regular_ones, uint32_t& rows) {
  std::vector<Stop> stops;
  auto mark = std::upper_bound(marks.begin(), marks.end(), begin);
  for (uint32_t at = 0; at < rows;) {
    uint32_t regular = regular_ones ? at + Session::kSnapshotInterval - (position + at) % Session::kSnapshotInterval : UINT32_MAX;
    uint32_t marked = mark != marks.end() ? *mark - begin : UINT32_MAX;
    at = std::min(regular, marked);
    if (at > rows) break;
    if (at == marked) ++mark;
    stops.push_back({at, at == marked});
    if (stops.size() > LILY_MAX_SNAPSHOTS) rows = at;
  }
  return stops;
}

}  // namespace

void Session::read(const int32_t* ids, size_t n, const Progress& progress, const Interrupt& interrupt, const BufferPtr& rows_out,
                   const std::function<void(uint32_t, uint32_t)>& each_chunk, const std::vector<uint32_t>& marks, bool keep_end) {
  const Model& model = engine_->model();
  const uint32_t room = rows_out ? uint32_t(rows_out->bytes() / (uint64_t(model.spec.hidden_size) * 4)) : UINT32_MAX;
  const uint32_t chunk = std::min(engine_->fitting_chunk(consumed_, n), room);
  {
    std::lock_guard<std::mutex> lock(content_);
    tokens_.reserve(tokens_.size() + n + 1);
    origins_.reserve(origins_.size() + n + 1);
  }
  if (pending()) consume_pending(engine_->request_buffer(uint64_t(model.spec.vocab_size) * 4), interrupt);
  BufferPtr id_buffer = engine_->request_buffer(uint64_t(Engine::row_bucket(uint32_t(std::min<size_t>(chunk, n)), chunk)) * 4);
  if (progress) progress(0, n);
  for (size_t begin = 0; begin < n;) {
    // Borders lie on a grid of absolute positions, so that the regular snapshots are states at the end of a chunk and cost nothing.
    uint32_t rows = uint32_t(std::min<size_t>(chunk - consumed_ % chunk, n - begin));
    const std::vector<Stop> stops = stops_within(consumed_, uint32_t(begin), marks, engine_->regular_snapshots(), rows);
    reserve(consumed_ + rows);
    auto* record = reinterpret_cast<LilyStep*>(step_->host());
    *record = {};
    record->position = consumed_;
    record->rows = rows;
    std::memcpy(id_buffer->host(), ids + begin, rows * 4);
    StatePtr in = current(), out = engine_->new_state();
    auto bound = common(in, out, step_);
    bound.push_back({model.use.ids, id_buffer});
    if (rows_out) bound.push_back({model.use.rows_out, rows_out});
    std::vector<Snapshot> passed;
    for (const Stop& stop : stops) {
      if (stop.after == rows) break;  // the state at the end, which is kept anyway
      StatePtr state = snapshot_state();
      if (!state) continue;
      record->snapshot_rows[record->n_snapshots] = stop.after - 1;
      bound.push_back({model.use.snapshots[record->n_snapshots++], *state});
      passed.push_back({consumed_ + stop.after, state, stop.marked});
    }
    auto cancel = std::make_shared<std::atomic<bool>>(false);
    engine_->wait(engine_->submit({Engine::ProgramKey::prefill, Engine::row_bucket(rows, chunk), rows_out != nullptr, consumed_ + rows}, bound, {nullptr, cancel, nullptr}), interrupt, cancel);
    if (each_chunk) each_chunk(uint32_t(begin), rows);
    commit_chunk(ids + begin, rows, out, passed, (keep_end && begin + rows == n) || (!stops.empty() && stops.back().after == rows && stops.back().marked));
    begin += rows;
    if (progress) progress(begin, n);
  }
}

void Session::commit_chunk(const int32_t* ids, uint32_t rows, const StatePtr& out, const std::vector<Snapshot>& passed, bool marked) {
  std::lock_guard<std::mutex> lock(content_);
  tokens_.insert(tokens_.end(), ids, ids + rows);
  origins_.insert(origins_.end(), rows, Origin::read);
  state_ = out;
  consumed_ += rows;
  for (const Snapshot& s : passed) keep_snapshot(s.position, s.state, s.marked);
  if (marked || (consumed_ % kSnapshotInterval == 0 && engine_->regular_snapshots())) keep_snapshot(consumed_, state_, marked);
}

void Session::commit_generated(int32_t token, const StatePtr& out, uint32_t consumed) {
  std::lock_guard<std::mutex> lock(content_);
  tokens_.push_back(token);
  origins_.push_back(Origin::generated);
  if (!out) return;
  state_ = out;
  consumed_ = consumed;
}

void Session::append(const int32_t* ids, size_t n, const Progress& progress, const Interrupt& interrupt, const std::vector<uint32_t>& marks, bool keep_end) {
  Busy busy(*this);
  check_ids(ids, n);
  for (size_t i = 0; i < marks.size(); i++)
    if (marks[i] < 1 || marks[i] >= n || (i && marks[i] <= marks[i - 1])) throw InvalidArgument("marks must be ascending numbers of ids between 1 and " + std::to_string(n - 1));
  read(ids, n, progress, interrupt, nullptr, nullptr, marks, keep_end);
}

void Session::append_rows(const int32_t* ids, size_t n, Rows mode, float* out, const Progress& progress, const Interrupt& interrupt) {
  Busy busy(*this);
  check_ids(ids, n);
  const Model& model = engine_->model();
  const uint64_t V = model.spec.vocab_size, H = model.spec.hidden_size;
  const uint32_t chunk = engine_->fitting_chunk(consumed_, n);
  BufferPtr rows_out = engine_->request_buffer(uint64_t(Engine::row_bucket(uint32_t(std::min<size_t>(chunk, n)), chunk)) * H * 4);
  BufferPtr head_step = engine_->request_buffer(sizeof(LilyStep));
  bool score = mode == Rows::score;
  BufferPtr result = engine_->request_buffer(score ? kHeadRows * 4 : kHeadRows * V * 4), targets = engine_->request_buffer(kHeadRows * 4);
  auto tiles = [&](uint32_t begin, uint32_t rows) {
    for (uint32_t at = 0; at < rows; at += kHeadRows) {
      uint32_t live = std::min(kHeadRows, rows - at);
      reinterpret_cast<LilyStep*>(head_step->host())->rows = live;
      int32_t* target = reinterpret_cast<int32_t*>(targets->host());
      for (uint32_t i = 0; i < live; i++) {
        size_t next = size_t(begin) + at + i + 1;
        target[i] = next < n ? ids[next] : -1;
      }
      auto cancel = std::make_shared<std::atomic<bool>>(false);
      std::vector<Engine::Bound> bound{{model.use.step, head_step}, {model.use.hidden_in, rows_out, at * H * 4}};
      if (score) {
        bound.push_back({model.use.targets, targets});
        bound.push_back({model.use.scores, result});
      } else {
        bound.push_back({model.use.logits, result});
      }
      engine_->wait(engine_->submit({Engine::ProgramKey::head_rows, Engine::row_bucket(live, kHeadRows), score}, bound, {nullptr, cancel, nullptr}), interrupt, cancel);
      uint64_t width = score ? 1 : V;
      std::memcpy(out + (uint64_t(begin) + at) * width, result->host(), live * width * 4);
    }
  };
  read(ids, n, progress, interrupt, rows_out, tiles, {});
}

void Session::logits(float* out, const Interrupt& interrupt) {
  Busy busy(*this);
  if (tokens_.empty()) throw InvalidArgument("the session is empty: append a prompt before asking for logits");
  const uint64_t bytes = uint64_t(engine_->model().spec.vocab_size) * 4;
  BufferPtr logits = engine_->request_buffer(bytes * 1);
  if (pending()) {
    consume_pending(logits, interrupt);
  } else {
    auto cancel = std::make_shared<std::atomic<bool>>(false);
    engine_->wait(submit_head(step_, logits, {nullptr, cancel, nullptr}), interrupt, cancel);
  }
  std::memcpy(out, logits->host(), bytes);
}

void Session::trace(const int32_t* ids, size_t n, const TraceSink& sink) {
  Busy busy(*this);
  check_ids(ids, n);
  if (n > kMaxChunk) throw InvalidArgument("a trace holds at most " + std::to_string(kMaxChunk) + " tokens");
  const Model& model = engine_->model();
  if (pending()) throw InvalidArgument("a trace starts after a consumed token");
  reserve(consumed_ + uint32_t(n));
  Program program = engine_->record({Engine::ProgramKey::prefill, uint32_t(n), false, consumed_ + uint32_t(n)}, {false, "trace", engine_->device()->traits()});
  Submission s;
  s.program = engine_->device()->prepare(program.dispatches(), program.order({Schedule::Kind::serial, 0, -1}));
  s.bindings = engine_->base_bindings();
  BufferPtr workspace = engine_->request_buffer(program.workspace_bytes()), id_buffer = engine_->request_buffer(n * 4);
  std::memcpy(id_buffer->host(), ids, n * 4);
  auto* record = reinterpret_cast<LilyStep*>(step_->host());
  *record = {};
  record->position = consumed_;
  record->rows = uint32_t(n);
  StatePtr in = current(), out = engine_->new_state();
  for (auto& b : common(in, out, step_)) s.bindings.set(b.symbol, {b.buffer, b.offset});
  s.bindings.set(model.use.ids, {id_buffer, 0});
  s.bindings.set(model.use.workspace, {workspace, 0});
  s.observe = [&](const Dispatch& d, const BindingSet& bindings) {
    for (const TraceTag& tag : d.traces) {
      const BufferUse& use = d.uses[tag.use];
      sink(tag, bindings[use.symbol].buffer->host() + bindings[use.symbol].offset + use.offset, use.bytes);
    }
  };
  engine_->wait(engine_->device()->submit(std::move(s)), nullptr, nullptr);
}

}  // namespace lily
