// The double-buffered decode loop of one request. Two slots, at most two steps in flight: step n+1 is submitted before step n is read, its
// input id is written by the device.
#pragma once
#include <array>
#include <optional>
#include <utility>

#include "engine/session.hpp"

namespace lily {

struct SamplingParams {
  float temperature = 0, top_p = 1, min_p = 0, repetition_penalty = 1, presence_penalty = 0, frequency_penalty = 0;
  uint32_t top_k = 0;
  uint64_t seed = 0;
  std::vector<std::pair<int32_t, float>> logit_bias;
  int logprobs = -1;    // alternatives; 0: the chosen token's only, -1: none
  bool masked = false;  // next() is given a mask for every token
};

struct DecodedToken {
  int32_t token;
  float logprob;
  std::vector<uint32_t> top_ids;
  std::vector<float> top_logprobs;
};

class Decoder {
 public:
  enum class Limit { none, max_tokens, context };

  // The session must hold at least one token and not be busy; it stays busy until close().
  Decoder(std::shared_ptr<Session> session, const SamplingParams& params, uint64_t max_tokens);
  ~Decoder();
  // The next token, or none at a limit. On an error or interrupt everything in flight is drained, the session stands where the last token returned left
  // it, and the decoder is closed. mask: uint32 [ceil(V/32)], bit set = allowed.
  std::optional<DecodedToken> next(const uint32_t* mask, size_t mask_words, const Interrupt& interrupt);
  // From any thread; a call of next() in another one ends with an error.
  void close();
  Limit limit() const { return limit_; }

 private:
  struct Slot {
    BufferPtr step, sample, mask;
    TicketPtr forward, sampled;
    StatePtr out;  // null when the step consumed nothing (the first, from a state already there)
  };
  void submit_forward(uint64_t k);
  void submit_sample(uint64_t k);
  void drain();
  void close_locked();

  std::mutex calls_;  // next() and close() exclude each other
  std::shared_ptr<Session> session_;
  std::shared_ptr<Engine> engine_;
  SamplingParams params_;
  std::optional<Session::Busy> busy_;
  std::array<Slot, 2> slots_;
  BufferPtr logits_, counts_, bias_;
  std::shared_ptr<std::atomic<bool>> cancel_;
  TicketPtr last_;
  StatePtr newest_;      // what the latest submitted step writes, or the session's state
  uint32_t base_ = 0;    // tokens of the session at the start
  bool pending_first_ = false;
  uint64_t count_ = 0;   // tokens that this request may produce
  uint64_t forwards_ = 0, samples_ = 0, read_ = 0;
  bool context_bound_ = false, closed_ = false;
  Limit limit_ = Limit::none;
};

}  // namespace lily
