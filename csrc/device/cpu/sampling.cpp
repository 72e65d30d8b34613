// Sampling and scoring: no sort of the vocabulary, logits read once.
// Order: penalties, bias, mask -> y (logprobs are of softmax(y)); then temperature, top-k, top-p, min-p, one Philox uniform.
#include "device/cpu/philox.hpp"
#include "device/cpu/sample_list.hpp"

namespace lily::cpu::LILY_CPU_NS {

// What the settings ask for; all three sample kernels decide by it.
struct Plan {
  bool greedy;
  uint32_t top_k;         // 0: off
  bool top_p;             // with top_k: of the k survivors
  uint32_t alternatives;  // logprobs wanted beside the token's own
};

LILY_INLINE Plan plan_of(const LilySample& s) {
  bool greedy = (s.flags & LILY_SAMPLE_GREEDY) || !(s.temperature > 0);
  uint32_t n = s.n_logprobs < LILY_MAX_LOGPROBS ? s.n_logprobs : LILY_MAX_LOGPROBS;
  return {greedy, greedy ? 0 : s.top_k, !greedy && s.top_p < 1, s.flags & LILY_SAMPLE_LOGPROBS ? n : 0};
}
LILY_INLINE bool needs_histogram(const Plan& p) { return p.top_k || p.alternatives; }
LILY_INLINE bool needs_mass(const Plan& p) { return p.top_p && !p.top_k; }

// sum of exp(x - highest): fp32 within 256 elements, double above.
LILY_INLINE double sum_exp(const float* x, uint32_t n, float highest) {
  double total = 0;
  for (uint32_t i = 0; i < n; i += 256) {
    V sum = zero();
    for (uint32_t k = i; k < i + 256 && k < n; k += 16) sum = add(sum, exp(sub(load_some(x + k, n - k, negative_infinity), splat(highest))));
    total += double(reduce_add(sum));
  }
  return total;
}

LILY_INLINE float highest_of(const float* x, uint32_t n) {
  V best = splat(negative_infinity);
  for (uint32_t i = 0; i < n; i += 16) best = max(load_some(x + i, n - i, negative_infinity), best);
  float t[16], m = negative_infinity;
  store(t, best);
  for (float v : t) m = v > m ? v : m;
  return m;
}

// score_rows. out[r] = logits[r][target] - log(sum(exp(logits[r]))), 0 where the target is negative. f32[64,V] -> f32[64]. grid: 64
template <class Act>
static void score_rows(const KernelCall& c, uint32_t begin, uint32_t end) {
  uint32_t vocab = args<LilySampleArgs>(c).V, rows = buffer<const LilyStep>(c, 0)->rows;
  for (uint32_t r = begin; r < end && r < rows; r++) {
    int32_t target = buffer<const int32_t>(c, 2)[r];
    float* out = buffer<float>(c, 3) + r;
    *out = 0;
    if (target < 0) continue;
    const float* x = buffer<const float>(c, 1) + uint64_t(r) * vocab;
    float highest = highest_of(x, vocab);
    *out = float(double(x[target]) - double(highest) - __builtin_log(sum_exp(x, vocab, highest)));
  }
}

// One adjusted logit. y > 0 ? y/r : y*r for a token of the session, then frequency and presence by its count in the output.
LILY_INLINE float penalise(const LilySample& s, float y, uint32_t count) {
  if (!count) return y;
  y = y > 0 ? y / s.repetition_penalty : y * s.repetition_penalty;
  uint32_t times = count & 0x7fffffffu;
  y -= s.frequency_penalty * float(times);
  return times ? y - s.presence_penalty : y;
}

// Sixteen adjusted logits from id i on, n of them real (the others -inf). NaN becomes -inf, +inf the largest float, -0 becomes +0.
LILY_INLINE V adjust(const KernelCall& c, const LilySample& s, uint32_t i, uint32_t n) {
  V y = load_some(buffer<const float>(c, 1) + i, n, negative_infinity);
  if (n > 16) n = 16;
  if (s.flags & (LILY_SAMPLE_PENALTY | LILY_SAMPLE_BIAS | LILY_SAMPLE_MASK)) {
    float t[16];
    store(t, y);
    const uint32_t* counts = buffer<const uint32_t>(c, 2) + i;
    if (s.flags & LILY_SAMPLE_PENALTY)
      for (uint32_t k = 0; k < n; k++) t[k] = penalise(s, t[k], counts[k]);
    if (s.flags & LILY_SAMPLE_BIAS)
      for (uint32_t k = 0; k < n; k++) t[k] += buffer<const float>(c, 3)[i + k];
    if (s.flags & LILY_SAMPLE_MASK) {
      uint32_t allowed = buffer<const uint32_t>(c, 4)[i / 32] >> i % 32;
      for (uint32_t k = 0; k < n; k++)
        if (!(allowed >> k & 1)) t[k] = negative_infinity;
    }
    y = load(t);
  }
  y = max(y, splat(negative_infinity));  // the second operand wins over a NaN
  return add(min(y, splat(__FLT_MAX__)), zero());
}

// The lowest allowed id of a block, for logits that are all -inf; none: all ones.
LILY_INLINE uint32_t first_allowed(const KernelCall& c, const LilySample& s, uint32_t begin, uint32_t end) {
  if (!(s.flags & LILY_SAMPLE_MASK)) return begin;
  for (uint32_t i = begin; i < end; i++)
    if (buffer<const uint32_t>(c, 4)[i / 32] >> i % 32 & 1) return i;
  return 0xffffffffu;
}

LILY_INLINE void count_digits(const float* y, uint32_t n, uint32_t* histogram) {
  uint32_t odd[LILY_HIST_BINS] = {};  // two tables, so that equal neighbours do not wait for each other
  std::memset(histogram, 0, LILY_HIST_BINS * 4);
  for (uint32_t i = 0; i + 1 < n; i += 2) histogram[first_digit(y[i])]++, odd[first_digit(y[i + 1])]++;
  if (n & 1) histogram[first_digit(y[n - 1])]++;
  for (uint32_t i = 0; i < LILY_HIST_BINS; i++) histogram[i] += odd[i];
}

// sample_adjust. y = the adjusted logits; per block of 16,384: max, its lowest id, sum(exp(y - max)); with top-k or alternatives the
// histogram of first digits. grid: V/16384. Bytes: 4V read (8V with counts, 12V with bias), 4V written.
template <class Act>
static void sample_adjust(const KernelCall& c, uint32_t begin, uint32_t end) {
  const auto& s = *buffer<const LilySample>(c, 0);
  uint32_t vocab = args<LilySampleArgs>(c).V;
  for (uint32_t b = begin; b < end; b++) {
    uint32_t from = b * LILY_SAMPLE_BLOCK, to = vocab - from < LILY_SAMPLE_BLOCK ? vocab : from + LILY_SAMPLE_BLOCK, id = 0;
    float *y = buffer<float>(c, 5), *block = buffer<float>(c, 6) + 4 * b;
    for (uint32_t i = from; i < to; i += 16) store_some(y + i, adjust(c, s, i, to - i), to - i);
    float highest = highest_of(y + from, to - from);
    block[0] = highest;
    block[2] = block[3] = 0;
    if (highest == negative_infinity) {
      id = first_allowed(c, s, from, to);
    } else {
      uint32_t lanes = 0;
      for (id = from; !(lanes = lanes_at_least(load_some(y + id, to - id, negative_infinity), splat(highest))); id += 16) {}
      id += uint32_t(__builtin_ctz(lanes));
      block[2] = float(sum_exp(y + from, to - from, highest));
    }
    block[1] = bits_float(id);
    if (needs_histogram(plan_of(s))) count_digits(y + from, to - from, buffer<uint32_t>(c, 7) + uint64_t(b) * LILY_HIST_BINS);
  }
}

struct Best {
  float highest;
  uint32_t id;
  double sum;  // of exp(y - highest) over the vocabulary
};

LILY_INLINE Best best_of(const float* blocks, uint32_t n) {
  Best best = {negative_infinity, 0xffffffffu, 0};
  for (uint32_t b = 0; b < n; b++) {
    uint32_t id = float_bits(blocks[4 * b + 1]);
    if (blocks[4 * b] > best.highest || (best.id == 0xffffffffu && best.highest == negative_infinity)) best.highest = blocks[4 * b], best.id = id;
  }
  if (best.highest == negative_infinity) return best.id = best.id == 0xffffffffu ? 0 : best.id, best;
  for (uint32_t b = 0; b < n; b++) best.sum += double(blocks[4 * b + 2]) * double(exp1(blocks[4 * b] - best.highest));
  return best;
}

// sample_mass. mass[b][digit] = sum of exp((y - M)/T) over the block's y of this first digit, in double. grid: V/16384
template <class Act>
static void sample_mass(const KernelCall& c, uint32_t begin, uint32_t end) {
  const auto& s = *buffer<const LilySample>(c, 0);
  const auto& a = args<LilySampleArgs>(c);
  if (!needs_mass(plan_of(s))) return;
  Weigh weigh{best_of(buffer<const float>(c, 2), a.blocks).highest, s.temperature};
  if (weigh.highest == negative_infinity) return;
  const float* y = buffer<const float>(c, 1);
  for (uint32_t b = begin; b < end; b++) {
    uint32_t from = b * LILY_SAMPLE_BLOCK, to = a.V - from < LILY_SAMPLE_BLOCK ? a.V : from + LILY_SAMPLE_BLOCK;
    double mass[LILY_HIST_BINS] = {};
    for (uint32_t i = from; i < to; i += 16) {
      float w[16];
      store(w, weigh(load_some(y + i, to - i, negative_infinity)));
      for (uint32_t k = 0; k < 16 && k < to - i; k++) mass[first_digit(y[i + k])] += double(w[k]);
    }
    float* out = buffer<float>(c, 3) + uint64_t(b) * LILY_HIST_BINS;
    for (uint32_t i = 0; i < LILY_HIST_BINS; i++) out[i] = float(mass[i]);
  }
}

// The lowest first digit that a set of the n largest reaches.
LILY_INLINE uint32_t digit_of_count(const uint32_t* histogram, uint32_t blocks, uint32_t from, uint32_t n) {
  uint64_t seen = 0;
  for (uint32_t d = from; d > lowest_digit; d--) {
    for (uint32_t b = 0; b < blocks; b++) seen += histogram[uint64_t(b) * LILY_HIST_BINS + d];
    if (seen >= n) return d;
  }
  return lowest_digit;
}
// The same for a set whose mass reaches p of the total, which is left in *total.
LILY_INLINE uint32_t digit_of_mass(const float* mass, uint32_t blocks, uint32_t from, double p, double* total) {
  double sums[LILY_HIST_BINS] = {}, seen = 0;
  *total = 0;
  for (uint32_t b = 0; b < blocks; b++)
    for (uint32_t d = lowest_digit; d <= from; d++) sums[d] += double(mass[uint64_t(b) * LILY_HIST_BINS + d]);
  for (uint32_t d = from; d >= lowest_digit; d--) *total += sums[d];
  for (uint32_t d = from; d > lowest_digit; d--)
    if ((seen += sums[d]) >= p * *total) return d;
  return lowest_digit;
}

// Sixteen weights, 0 below min_p (relative to the largest weight, which is 1).
LILY_INLINE V survivors(const Weigh& weigh, V y, float min_p) {
  V w = weigh(y);
  U below = shr<31>(bits(sub(w, splat(min_p))));
  return from_bits(andu(bits(w), addu(splatu(0xffffffffu), below)));
}

// Inverse CDF in ascending id order: the first candidate with cumulative weight > u * total, else the last with any weight.
static uint32_t draw(const Candidates& c, const Weigh& weigh, float min_p, float u) {
  double total = 0, seen = 0;
  float w[64];
  auto weigh_chunk = [&](uint32_t i) {  // its sum: fp32 within 64 elements
    V sum = zero();
    for (uint32_t k = 0; k < 64; k += 16) {
      V v = i + k < c.count ? survivors(weigh, load_some(c.values + i + k, c.count - i - k, negative_infinity), min_p) : zero();
      store(w + k, v);
      sum = add(sum, v);
    }
    return double(reduce_add(sum));
  };
  constexpr uint32_t parts = 256;  // sums of parts, so that only the one that crosses is weighed again; u < 1, so one does
  double sums[parts] = {};
  uint32_t part = (c.count / parts / 64 + 1) * 64, n = 0;
  for (uint32_t i = 0; i < c.count; i += part) {
    double sum = 0;
    for (uint32_t k = i; k < i + part && k < c.count; k += 64) sum += weigh_chunk(k);
    total += sums[n++] = sum;
  }
  double target = double(u) * total;
  uint32_t last = 0, from = 0;
  while (from + 1 < n && seen + sums[from] <= target) seen += sums[from++];
  for (uint32_t i = from * part; i < (from + 1) * part && i < c.count; i += 64) {
    weigh_chunk(i);
    for (uint32_t k = 0; k < 64 && i + k < c.count; k++) {
      if (!(w[k] > 0)) continue;
      last = i + k;
      if ((seen += double(w[k])) > target) return last;
    }
  }
  return last;
}

// The n largest of the list, descending, ties to the lower id; the places that are left hold no id and -inf.
static void write_alternatives(LilySample& s, const Candidates& c, uint32_t n, double log_total) {
  float values[LILY_MAX_LOGPROBS];
  uint32_t ids[LILY_MAX_LOGPROBS], count = 0, ties = 0;
  Cut cut = select_count(c, n);
  for (uint32_t i = 0; i < c.count; i++) {
    uint32_t key = order_key(c.values[i]);
    if (key < cut.key || (key == cut.key && ties++ >= cut.ties)) continue;
    uint32_t at = count++;
    for (; at > 0 && values[at - 1] < c.values[i]; at--) values[at] = values[at - 1], ids[at] = ids[at - 1];
    values[at] = c.values[i];
    ids[at] = c.ids[i];
  }
  for (uint32_t i = 0; i < n; i++) {
    s.top_ids[i] = i < count ? ids[i] : 0xffffffffu;
    s.top_logprobs[i] = i < count ? float(double(values[i]) - log_total) : negative_infinity;
  }
}

// sample_draw. Alternatives, then top-k, top-p, min-p and the draw. Candidates that can matter are gathered in id order by their first
// digit into `list` (used as V values, then V ids) and refined there; with neither top-k nor top-p the draw runs over y. grid: 1
template <class Act>
static void sample_draw(const KernelCall& c, uint32_t begin, uint32_t end) {
  if (begin >= end) return;
  auto& s = *buffer<LilySample>(c, 0);
  const auto& a = args<LilySampleArgs>(c);
  float* y = buffer<float>(c, 1);
  Plan plan = plan_of(s);
  Best best = best_of(buffer<const float>(c, 2), a.blocks);
  bool any = best.highest > negative_infinity;
  double log_total = double(best.highest) + (any ? __builtin_log(best.sum) : 0.0);
  uint32_t token = best.id, top = first_digit(best.highest);
  Candidates list = {buffer<float>(c, 5), buffer<uint32_t>(c, 5) + a.V, 0};

  if (plan.alternatives) {
    uint32_t digit = any ? digit_of_count(buffer<const uint32_t>(c, 3), a.blocks, top, plan.alternatives) : 0;
    if (any) gather(y, a.V, digit_floor(digit), list);
    write_alternatives(s, list, plan.alternatives, log_total);
  }
  if (any && !plan.greedy) {
    Weigh weigh{best.highest, s.temperature};
    Candidates from = {y, nullptr, a.V};
    double p = double(s.top_p), total = 0;
    if (plan.top_k) {
      gather(y, a.V, digit_floor(digit_of_count(buffer<const uint32_t>(c, 3), a.blocks, top, plan.top_k)), list);
      keep(list, select_count(list, plan.top_k), list);
      for (uint32_t i = 0; i < list.count && plan.top_p; i += 16)
        total += double(reduce_add(weigh(load_some(list.values + i, list.count - i, negative_infinity))));
      from = list;
    } else if (plan.top_p) {
      gather(y, a.V, digit_floor(digit_of_mass(buffer<const float>(c, 4), a.blocks, top, p, &total)), list);
      from = list;
    }
    if (plan.top_p) {
      keep(list, select_mass(list, weigh, p * total), list);
      from = list;
    }
    uint32_t word = philox(s.seed_lo, s.seed_hi, {{s.position, 0, 0, 0}}).word[0];
    uint32_t at = draw(from, weigh, s.min_p < 1 ? s.min_p : 1, float(word >> 8) * 0x1p-24f);
    token = from.ids ? from.ids[at] : at;
  }

  s.token = token;
  s.logprob = any ? float(double(y[token]) - log_total) : negative_infinity;
  if (s.flags & LILY_SAMPLE_PENALTY) {
    uint32_t* counts = buffer<uint32_t>(c, 6);
    counts[token] = (counts[token] + 1) | 0x80000000u;
  }
  if (auto* next = buffer<LilyStep>(c, 7)) next->token = token;
}

}  // namespace lily::cpu::LILY_CPU_NS

LILY_KERNELS(sampling, {"score_rows", score_rows<Bf16>, score_rows<F32>}, {"sample_adjust", sample_adjust<Bf16>, sample_adjust<F32>},
             {"sample_mass", sample_mass<Bf16>, sample_mass<F32>}, {"sample_draw", sample_draw<Bf16>, sample_draw<F32>})
