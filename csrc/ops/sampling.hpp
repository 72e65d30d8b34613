// The sampler: three dispatches over the logits of one row.
#pragma once
#include "ops/recorder.hpp"

namespace lily {

struct SampleUse {
  BufferUse sample, logits, counts, bias, mask, next_step;
};

void sample(Recorder& r, uint32_t vocab, const SampleUse& use);
// out[i] = log softmax(logits[i])[targets[i]] for at most 64 rows.
void score_rows(Recorder& r, const BufferUse& step, uint32_t vocab, const BufferUse& logits, const BufferUse& targets, const BufferUse& out);

}  // namespace lily
