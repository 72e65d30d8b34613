#include "engine/session.hpp"

#include <algorithm>
#include <cstring>

namespace lily {

Session::Session(std::shared_ptr<Engine> engine) : engine_(std::move(engine)) { step_ = engine_->request_buffer(sizeof(LilyStep)); }

Session::Busy::Busy(Session& s) : session(s) {
  if (s.busy_.exchange(true)) throw InvalidArgument("session is busy: another call or an open stream uses it; fork() it to work in parallel");
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
  std::lock_guard<std::mutex> lock(engine_->mutex());
  KvCache& kv = engine_->kv();
  size_t needed = (size_t(end) + LILY_KV_BLOCK - 1) / LILY_KV_BLOCK, first = consumed_ / LILY_KV_BLOCK;
  // The block that the next row goes into may be shared with a fork: then it is copied first.
  bool copied = false;
  if (first < blocks_.size() && blocks_[first].use_count() > 1) {
    KvBlockPtr own = kv.allocate();
    kv.copy(blocks_[first]->index(), own->index());
    blocks_[first] = own;
    copied = true;
  }
  size_t had = blocks_.size();
  while (blocks_.size() < needed) blocks_.push_back(kv.allocate());
  if (!table_ || table_->bytes() < needed * 4) {
    table_ = engine_->request_buffer(std::max<size_t>(16, needed * 2) * 4);
    had = 0;
  }
  uint32_t* table = reinterpret_cast<uint32_t*>(table_->host());
  if (copied) table[first] = blocks_[first]->index();
  // Entries already there are read by steps in flight and are not touched.
  for (size_t i = had; i < blocks_.size(); i++) table[i] = blocks_[i]->index();
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
  state_ = out;
  consumed_++;
}

void Session::read(const int32_t* ids, size_t n, const Progress& progress, const Interrupt& interrupt, const BufferPtr& rows_out,
                   const std::function<void(uint32_t, uint32_t)>& each_chunk, uint32_t chunk) {
  const Model& model = engine_->model();
  if (pending()) consume_pending(engine_->request_buffer(uint64_t(model.spec.vocab_size) * 4), interrupt);
  BufferPtr id_buffer = engine_->request_buffer(uint64_t(Engine::row_bucket(uint32_t(std::min<size_t>(chunk, n)), chunk)) * 4);
  if (progress) progress(0, n);
  for (size_t begin = 0; begin < n;) {
    uint32_t rows = uint32_t(std::min<size_t>(chunk, n - begin));
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
    auto cancel = std::make_shared<std::atomic<bool>>(false);
    engine_->wait(engine_->submit({Engine::ProgramKey::prefill, Engine::row_bucket(rows, chunk), rows_out != nullptr}, bound, {nullptr, cancel, nullptr}), interrupt, cancel);
    if (each_chunk) each_chunk(uint32_t(begin), rows);
    state_ = out;
    consumed_ += rows;
    tokens_.insert(tokens_.end(), ids + begin, ids + begin + rows);
    origins_.insert(origins_.end(), rows, Origin::read);
    begin += rows;
    if (progress) progress(begin, n);
  }
}

void Session::append(const int32_t* ids, size_t n, const Progress& progress, const Interrupt& interrupt) {
  Busy busy(*this);
  check_ids(ids, n);
  read(ids, n, progress, interrupt, nullptr, nullptr, engine_->chunk());
}

void Session::append_rows(const int32_t* ids, size_t n, Rows mode, float* out, const Progress& progress, const Interrupt& interrupt) {
  Busy busy(*this);
  check_ids(ids, n);
  const Model& model = engine_->model();
  const uint64_t V = model.spec.vocab_size, H = model.spec.hidden_size;
  const uint32_t chunk = engine_->chunk();
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
  read(ids, n, progress, interrupt, rows_out, tiles, chunk);
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

std::shared_ptr<Session> Session::fork() {
  Busy busy(*this);
  auto copy = std::make_shared<Session>(engine_);
  copy->tokens_ = tokens_;
  copy->origins_ = origins_;
  copy->consumed_ = consumed_;
  copy->state_ = state_;
  copy->blocks_ = blocks_;
  return copy;
}

void Session::trace(const int32_t* ids, size_t n, const TraceSink& sink) {
  Busy busy(*this);
  check_ids(ids, n);
  if (n > kMaxChunk) throw InvalidArgument("a trace holds at most " + std::to_string(kMaxChunk) + " tokens");
  const Model& model = engine_->model();
  if (pending()) throw InvalidArgument("a trace starts after a consumed token");
  reserve(consumed_ + uint32_t(n));
  Program program = engine_->record({Engine::ProgramKey::prefill, uint32_t(n), false}, {false, "trace"});
  Submission s;
  s.program = engine_->device()->prepare(program.dispatches(), program.order({Schedule::Kind::serial, 0, -1}));
  engine_->bind_fixed(s.bindings);
  BufferPtr workspace = engine_->request_buffer(program.workspace_bytes()), id_buffer = engine_->request_buffer(n * 4);
  std::memcpy(id_buffer->host(), ids, n * 4);
  auto* record = reinterpret_cast<LilyStep*>(step_->host());
  *record = {};
  record->position = consumed_;
  record->rows = uint32_t(n);
  StatePtr in = current(), out = engine_->new_state();
  for (auto& b : common(in, out, step_)) s.bindings[b.symbol] = {b.buffer, b.offset};
  s.bindings[model.use.ids] = {id_buffer, 0};
  s.bindings[model.use.workspace] = {workspace, 0};
  s.observe = [&](const Dispatch& d, const Bindings& bindings) {
    for (const TraceTag& tag : d.traces) {
      const BufferUse& use = d.uses[tag.use];
      sink(tag, bindings[use.symbol].buffer->host() + bindings[use.symbol].offset + use.offset, use.bytes);
    }
  };
  engine_->wait(engine_->device()->submit(std::move(s)), nullptr, nullptr);
}

uint64_t Session::nbytes() const {
  uint64_t bytes = uint64_t(blocks_.size()) * engine_->model().kv_block_bytes() * 2 * engine_->model().spec.attention_layers();
  if (state_) bytes += engine_->state_bytes();
  return bytes + tokens_.size() * 5;
}

}  // namespace lily
