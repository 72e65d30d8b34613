#include "ops/sampling.hpp"

namespace lily {

void sample(Recorder& r, uint32_t vocab, const SampleUse& use) {
  LilySampleArgs a{vocab, blocks(vocab, LILY_SAMPLE_BLOCK)};
  uint64_t bins = uint64_t(a.blocks) * LILY_HIST_BINS;
  Slot y = r.floats("adjusted", vocab), block = r.floats("blocks", uint64_t(a.blocks) * 4), hist = r.words("hist", bins), mass = r.floats("mass", bins);
  Slot list = r.floats("candidates", uint64_t(vocab) * 2);
  r.program.record(make_dispatch("sample_adjust", "sample.adjust", a, {use.sample, use.logits, use.counts, use.bias, use.mask, y.write(), block.write(), hist.write()}, a.blocks));
  r.program.record(make_dispatch("sample_mass", "sample.mass", a, {use.sample, y.read(), block.read(), mass.write()}, a.blocks));
  BufferUse record = use.sample, counts = use.counts;
  record.access = Access::read_write;
  if (counts.symbol != kNoSymbol) counts.access = Access::read_write;
  r.program.record(make_dispatch("sample_draw", "sample.draw", a, {record, y.read(), block.read(), hist.read(), mass.read(), list.update(), counts, use.next_step}, 1));
}

void score_rows(Recorder& r, const BufferUse& step, uint32_t vocab, const BufferUse& logits, const BufferUse& targets, const BufferUse& out) {
  LilySampleArgs a{vocab, 0};
  r.program.record(make_dispatch("score_rows", "score", a, {step, logits, targets, out}, 64));
}

}  // namespace lily
