#include "engine/decoder.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace lily {

Decoder::Decoder(std::shared_ptr<Session> session, const SamplingParams& params, uint64_t max_tokens)
    : session_(std::move(session)), engine_(session_->engine()), params_(params) {
  busy_.emplace(*session_);
  if (session_->tokens().empty()) throw InvalidArgument("the session is empty: append a prompt before generating");
  const uint32_t V = engine_->model().spec.vocab_size;
  base_ = uint32_t(session_->tokens().size());
  pending_first_ = session_->pending();
  uint64_t room = engine_->max_context() - base_;
  count_ = std::min(max_tokens, room);
  context_bound_ = room < max_tokens;
  newest_ = session_->current();
  cancel_ = std::make_shared<std::atomic<bool>>(false);
  logits_ = engine_->request_buffer(uint64_t(V) * 4);

  LilySample settings{};
  if (!(params.temperature > 0)) settings.flags |= LILY_SAMPLE_GREEDY;
  if (params.logprobs >= 0) settings.flags |= LILY_SAMPLE_LOGPROBS;
  settings.temperature = params.temperature;
  settings.top_k = params.top_k;
  settings.top_p = params.top_p;
  settings.min_p = params.min_p;
  settings.repetition_penalty = params.repetition_penalty;
  settings.presence_penalty = params.presence_penalty;
  settings.frequency_penalty = params.frequency_penalty;
  settings.seed_lo = uint32_t(params.seed);
  settings.seed_hi = uint32_t(params.seed >> 32);
  settings.n_logprobs = uint32_t(std::clamp(params.logprobs, 0, LILY_MAX_LOGPROBS));
  if (params.repetition_penalty != 1 || params.presence_penalty != 0 || params.frequency_penalty != 0) {
    settings.flags |= LILY_SAMPLE_PENALTY;
    counts_ = engine_->request_buffer(uint64_t(V) * 4);
    auto* counts = reinterpret_cast<uint32_t*>(counts_->host());
    std::memset(counts, 0, uint64_t(V) * 4);
    for (int32_t id : session_->tokens()) counts[id] |= 0x80000000u;
  }
  if (!params.logit_bias.empty()) {
    settings.flags |= LILY_SAMPLE_BIAS;
    bias_ = engine_->request_buffer(uint64_t(V) * 4);
    auto* bias = reinterpret_cast<float*>(bias_->host());
    std::memset(bias, 0, uint64_t(V) * 4);
    for (auto [id, value] : params.logit_bias) {
      if (id < 0 || uint32_t(id) >= V) throw SamplingError("logit_bias: token id " + std::to_string(id) + " is outside the vocabulary of " + std::to_string(V));
      bias[id] = value;
    }
  }
  if (params.masked) settings.flags |= LILY_SAMPLE_MASK;
  for (Slot& slot : slots_) {
    slot.step = engine_->request_buffer(sizeof(LilyStep));
    std::memset(slot.step->host(), 0, sizeof(LilyStep));
    slot.sample = engine_->request_buffer(sizeof(LilySample));
    std::memcpy(slot.sample->host(), &settings, sizeof(settings));
    if (params.masked) slot.mask = engine_->request_buffer((uint64_t(V) + 31) / 32 * 4);
  }
}

Decoder::~Decoder() { close(); }

// Step k draws token base + k. Its forward part consumes token base + k - 1, except for k = 0 on a session whose last token is consumed already.
void Decoder::submit_forward(uint64_t k) {
  Slot& slot = slots_[k & 1];
  Engine::Request request{last_, cancel_, nullptr};
  slot.out = nullptr;
  if (k == 0 && !pending_first_) {
    last_ = session_->submit_head(slot.step, logits_, request);
  } else {
    uint32_t position = base_ + uint32_t(k) - 1;
    session_->reserve(position + 1);
    if (k == 0) reinterpret_cast<LilyStep*>(slot.step->host())->token = uint32_t(session_->tokens().back());
    slot.out = session_->engine()->new_state();
    last_ = session_->submit_decode(slot.step, position, newest_, slot.out, logits_, request);
    newest_ = slot.out;
  }
  slot.forward = last_;
  forwards_ = k + 1;
}

void Decoder::submit_sample(uint64_t k) {
  Slot &slot = slots_[k & 1], &next = slots_[(k + 1) & 1];
  const StepSymbols& use = engine_->model().use;
  reinterpret_cast<LilySample*>(slot.sample->host())->position = base_ + uint32_t(k);
  std::vector<Engine::Bound> bound{{use.sample, slot.sample}, {use.logits, logits_}, {use.next_step, next.step}};
  if (counts_) bound.push_back({use.counts, counts_});
  if (bias_) bound.push_back({use.bias, bias_});
  if (slot.mask) bound.push_back({use.mask, slot.mask});
  last_ = engine_->submit({Engine::ProgramKey::sampler}, bound, {last_, cancel_, nullptr});
  slot.sampled = last_;
  samples_ = k + 1;
}

void Decoder::drain() {
  cancel_->store(true);
  if (last_ && !engine_->forked())
    while (!last_->wait_for(std::chrono::milliseconds(1000))) {
    }
}

void Decoder::close() {
  cancel_->store(true);  // what a next() in another thread waits for ends at the next stage
  std::lock_guard<std::mutex> lock(calls_);
  close_locked();
}

void Decoder::close_locked() {
  if (closed_) return;
  closed_ = true;
  drain();
  slots_ = {};
  newest_ = nullptr;
  busy_.reset();
}

std::optional<DecodedToken> Decoder::next(const uint32_t* mask, size_t mask_words, const Interrupt& interrupt) {
  std::lock_guard<std::mutex> lock(calls_);
  if (closed_) throw InvalidArgument("the generation is closed");
  if (read_ >= count_) {
    limit_ = context_bound_ ? Limit::context : Limit::max_tokens;
    return std::nullopt;
  }
  const uint64_t words = (uint64_t(engine_->model().spec.vocab_size) + 31) / 32;
  if (params_.masked && (!mask || mask_words != words))
    throw InvalidArgument("token_mask returned " + std::to_string(mask ? mask_words : 0) + " words, expected " + std::to_string(words) + " (uint32, one bit for each id)");
  try {
    Slot& slot = slots_[read_ & 1];
    if (params_.masked) {
      // The forward pass of the next step waits for no mask, only its sampling does.
      if (forwards_ == read_) submit_forward(read_);
      std::memcpy(slot.mask->host(), mask, words * 4);
      submit_sample(read_);
      if (forwards_ < std::min(read_ + 2, count_)) submit_forward(forwards_);
    } else {
      while (samples_ < std::min(read_ + 2, count_)) {
        submit_forward(samples_);
        submit_sample(samples_);
      }
    }
    try {
      engine_->wait(slot.sampled, interrupt, cancel_);
    } catch (const GPUError&) {
      slot.forward->check();  // the forward part's own failure, when the sample part was only skipped
      throw;
    }
    const auto& result = *reinterpret_cast<const LilySample*>(slot.sample->host());
    DecodedToken token{int32_t(result.token), result.logprob, {}, {}};
    if (params_.logprobs > 0) {
      for (uint32_t i = 0; i < result.n_logprobs && result.top_ids[i] != ~0u; i++) {  // fewer when most ids are masked
        token.top_ids.push_back(result.top_ids[i]);
        token.top_logprobs.push_back(result.top_logprobs[i]);
      }
    }
    session_->commit_generated(token.token, slot.out, base_ + uint32_t(read_));
    read_++;
    return token;
  } catch (...) {
    close_locked();
    throw;
  }
}

}  // namespace lily
