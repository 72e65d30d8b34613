#include "device/metal/tensor_choice.hpp"

#include <cmath>
#include <cstring>
#include <mutex>

#include "args.h"
#include "base/error.hpp"
#include "device/metal/encoder.hpp"

namespace lily::metal {
namespace {

constexpr uint32_t kFirstOs = 2602;  // tensors of threadgroup memory behave as documented from macOS 26.2 on
constexpr int kFirstFamily = 10;     // M5: GPUs with matrix units
const char* const kKernels[] = {"gemm", "gemm_residual", "gate_up_rows", "moe_gemm_rows", "moe_gate_up_rows"};

std::mutex choice_mutex;
std::optional<TensorChoice> known;

// One product of `live` rows with a 4-bit weight, and its value in float64.
struct Trial {
  static constexpr uint32_t T = 64, K = 256, N = 128, group = 64;
  uint32_t live;
  BufferPtr step, x, y, codes, scales, biases;
  std::vector<double> expected, magnitude;

  Trial(Device& device, uint32_t live_rows) : live(live_rows) {
    step = device.allocate(sizeof(LilyStep));
    x = device.allocate(T * K * 2);
    y = device.allocate(T * N * 4);
    codes = device.allocate(N * K / 2);
    scales = device.allocate(N * K / group * 2);
    biases = device.allocate(N * K / group * 2);
    LilyStep s{};
    s.rows = live;
    std::memcpy(step->host(), &s, sizeof s);
    uint32_t state = 1;
    auto random = [&] { return (state = state * 1664525u + 1013904223u) >> 8; };
    auto fill = [&](const BufferPtr& b, size_t n, float low, float high) {
      auto* out = reinterpret_cast<uint16_t*>(b->host());
      for (size_t i = 0; i < n; i++) out[i] = f32_to_bf16(low + (high - low) * float(random()) / float(1u << 24));
      return out;
    };
    const uint16_t* xs = fill(x, T * K, -2, 2);
    const uint16_t* ss = fill(scales, N * K / group, 0.005f, 0.02f);
    const uint16_t* bs = fill(biases, N * K / group, -0.2f, 0.05f);
    for (size_t i = 0; i < N * K / 2; i++) codes->host()[i] = uint8_t(random());
    expected.resize(T * N);
    magnitude.resize(T * N);
    for (uint32_t n = 0; n < N; n++)
      for (uint32_t k = 0; k < K; k++) {
        const uint32_t code = codes->host()[(n * K + k) / 2] >> (k % 2 * 4) & 15, g = n * (K / group) + k / group;
        const double w = bf16_to_f32(f32_to_bf16(std::fma(bf16_to_f32(ss[g]), float(code), bf16_to_f32(bs[g]))));
        for (uint32_t t = 0; t < T; t++) {
          const double p = w * bf16_to_f32(xs[t * K + k]);
          expected[t * N + n] += p;
          magnitude[t * N + n] += std::fabs(p);
        }
      }
  }

  std::vector<float> run(Gpu& gpu, Device& device, const char* variant) {
    enum : Symbol { kStep, kX, kY, kCodes, kScales, kBiases };
    LilyGemmArgs a{};
    a.fmt = {LILY_W_AFFINE, 4, group};
    a.K = K;
    a.N = a.ldy = N;
    a.rows_per_token = 1;
    Dispatch d;
    d.kernel = "gemm";
    d.label = std::string("self-check of the tensor operations, ") + variant;
    d.args.resize(sizeof a);
    std::memcpy(d.args.data(), &a, sizeof a);
    d.rows = T;
    d.groups = N / 64;
    const BufferPtr buffers[] = {step, x, y, codes, scales, biases};
    auto fixed = std::make_shared<Bindings>();
    for (Symbol s = kStep; s <= kBiases; s++) {
      d.uses.push_back({s, 0, buffers[s]->bytes(), s == kY ? Access::write : Access::read});
      fixed->push_back({buffers[s], 0});
    }
    Tuning tuning;
    tuning.forced = {{"gemm", variant}};
    std::memset(y->host(), 0xff, T * N * 4);
    Submission submission;
    submission.program = prepare_program(gpu, tuning, {d}, {{0}});
    submission.bindings = {fixed, {}};
    TicketPtr ticket = device.submit(std::move(submission));
    while (!ticket->wait_for(std::chrono::milliseconds(1000))) {
    }
    ticket->check();
    const auto* out = reinterpret_cast<const float*>(y->host());
    return {out, out + live * N};
  }

  // The largest difference in units of the sum of the products' sizes; not-a-number is one.
  template <class A, class B>
  double largest(const A& a, const B& b) const {
    double worst = 0;
    for (size_t i = 0; i < live * N; i++) {
      const double e = std::fabs(double(a[i]) - double(b[i])) / magnitude[i];
      if (!(e <= worst)) worst = e;
      if (std::isnan(e)) return e;
    }
    return worst;
  }
  double error(const std::vector<float>& y) const { return largest(y, expected); }
  double distance(const std::vector<float>& a, const std::vector<float>& b) const { return largest(a, b); }
};

}  // namespace

TensorChoice examine_tensor(Gpu& gpu, Device& device) {
  const double bound = std::ldexp(1.0, -14);  // a float32 sum of 256 products is within 2^-16
  TensorChoice c;
  try {
    if (c.reason = gpu.compile_tensor(); !c.reason.empty()) return c;
    for (uint32_t live : {64u, 41u}) {  // whole tiles, and a part of one
      Trial trial(device, live);
      const std::vector<float> plain = trial.run(gpu, device, "tile32"), small = trial.run(gpu, device, "tensor16"), large = trial.run(gpu, device, "tensor32");
      for (const auto* y : {&small, &large}) {
        const double error = trial.error(*y), apart = trial.distance(*y, plain), own = trial.error(plain);
        if (error <= bound && apart <= bound && own <= bound) continue;
        c.reason = "self-check failed: error " + std::to_string(error) + " of the products' sizes, " + std::to_string(apart) + " from simdgroup_matrix, whose own is " + std::to_string(own);
        return c;
      }
      c.one_tile = c.one_tile || std::memcmp(small.data(), large.data(), small.size() * sizeof(float)) != 0;
    }
    c.use = true;
    c.reason = c.one_tile ? "self-check passed; tiles of 16 and 32 rows differ in bits, so that all have 32" : "self-check passed, equal bits from both tile sizes";
  } catch (const OutOfMemoryError&) {
    throw;
  } catch (const Error& e) {
    c.use = false;
    c.reason = e.what();
  }
  return c;
}

std::string tensor_gate(const Limits& limits, const Settings& settings) {
  if (settings.tensor == Settings::Tensor::off) return "switched off by LILY_METAL_TENSOR";
  if (settings.tensor == Settings::Tensor::on) return "";
  if (limits.family < kFirstFamily) return "this GPU has no matrix units";
  if (limits.os < kFirstOs) return "they need macOS 26.2 or later";
  return "";
}

TensorChoice choose_tensor(const Limits& limits, const Settings& settings, DType storage, const std::function<TensorChoice()>& examine) {
  if (storage == DType::f32) return {false, false, "activations in float32"};
  const std::string closed = tensor_gate(limits, settings);
  if (!closed.empty()) return {false, false, closed};
  std::lock_guard<std::mutex> lock(choice_mutex);
  if (known) return *known;
  try {
    known = examine();
    return *known;
  } catch (const Error& e) {  // no memory, say: asked again the next time
    return {false, false, e.what()};
  }
}

void forget_tensor_choice() {
  std::lock_guard<std::mutex> lock(choice_mutex);
  known.reset();
}

void apply(const TensorChoice& choice, Tuning& tuning) {
  if (!choice.use) return;
  for (const char* kernel : kKernels) tuning.chosen.push_back({kernel, choice.one_tile && std::string(kernel).starts_with("g") ? "tensor32" : "tensor"});
  tuning.chosen_reason = "tensor operations of this GPU, " + choice.reason;
}

}  // namespace lily::metal
