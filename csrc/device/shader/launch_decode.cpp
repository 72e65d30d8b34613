// Launches of the decode and shared kernels: grid, threads and function constants from the recorded arguments.
#include <algorithm>

#include "args.h"
#include "base/error.hpp"
#include "device/shader/launch.hpp"

namespace lily {
namespace {

constexpr uint32_t kGemvRows = 32, kGemvThreads = 256;  // 8 simdgroups of 4 rows
constexpr uint32_t kSmallK = 2048, kLargestK = 6144;    // normed inputs that fit threadgroup memory, in two sizes
constexpr uint32_t kLargestH = 8192;                    // rows that rmsnorm_rows sums
constexpr uint32_t kMaxHeadDim = 256;

uint32_t cut(uint32_t n, uint32_t size) { return (n + size - 1) / size; }

[[noreturn]] void refuse(const Dispatch& d, const std::string& why) { throw DeviceError(d.kernel + " (" + d.label + "): " + why); }

Launch launch(std::string function, uint32_t grid, uint32_t threads) {
  Launch l;
  l.function = std::move(function);
  l.grid[0] = grid;
  l.threads = threads;
  return l;
}

void check_format(const Dispatch& d, const LilyFormat& f, uint32_t K) {
  if (K == 0 || K % 16) refuse(d, "rows of " + std::to_string(K) + " values, expected a multiple of 16");
  if (f.kind != LILY_W_AFFINE) return;
  const bool bits = f.bits == 2 || f.bits == 3 || f.bits == 4 || f.bits == 5 || f.bits == 6 || f.bits == 8;
  if (!bits || (f.group != 32 && f.group != 64 && f.group != 128) || K % f.group)
    refuse(d, std::to_string(f.bits) + " bits in groups of " + std::to_string(f.group) + " over " + std::to_string(K) + " values");
}

// Constants 0, 1 and 2: the weights' formats, and whether the arithmetic is left out.
void weights(Launch& l, const Dispatch& d, const LilyFormat& a, uint32_t K_a, const LilyFormat& b, uint32_t K_b, const std::string* variant) {
  check_format(d, a, K_a);
  check_format(d, b, K_b);
  const bool read = variant && *variant == "read";
  l.constants = {format_constant(a), format_constant(b), read};
  l.reason = read ? "forced: the weights are read, nothing is multiplied" : "8 simdgroups of 4 rows";
}

// Kernels that hold the normed input in threadgroup memory come in two sizes.
std::string sized(const Dispatch& d, uint32_t K) {
  if (K > kLargestK) refuse(d, "a normed input of " + std::to_string(K) + " values, at most " + std::to_string(kLargestK) + " fit");
  return d.kernel + (K <= kSmallK ? "_2048" : "_6144");
}

Launch plan_gemv(const Dispatch& d, const std::string* variant) {
  const auto& a = args_of<LilyGemvArgs>(d);
  uint32_t groups = 0;
  for (uint32_t i = 0; i < a.n_segments; i++) groups += cut(a.seg[i].rows, kGemvRows);
  Launch l = launch(d.kernel == "gemv_norm" ? sized(d, a.K) : d.kernel, groups, kGemvThreads);
  weights(l, d, a.fmt, a.K, a.fmt, a.K, variant);
  return l;
}

Launch plan_gate_up_norm(const Dispatch& d, const std::string* variant) {
  const auto& a = args_of<LilyGateUpArgs>(d);
  Launch l = launch(sized(d, a.K), cut(a.I, kGemvRows), kGemvThreads);
  weights(l, d, a.gate, a.K, a.up, a.K, variant);
  return l;
}

void check_experts(const Dispatch& d, const LilyMoeArgs& a) {
  if (a.E > kMaxExperts || a.k > LILY_MAX_EXPERTS_PER_TOKEN || a.k > a.E)
    refuse(d, std::to_string(a.k) + " of " + std::to_string(a.E) + " experts, at most " + std::to_string(LILY_MAX_EXPERTS_PER_TOKEN) + " of " + std::to_string(kMaxExperts));
}

Launch plan_moe_gate_up(const Dispatch& d, const std::string* variant) {
  const auto& a = args_of<LilyMoeArgs>(d);
  check_experts(d, a);
  Launch l = launch(sized(d, a.K), a.k * cut(a.I, kGemvRows) + (a.ninth ? cut(a.S, kGemvRows) : 0), kGemvThreads);
  weights(l, d, a.a, a.K, a.b, a.K, variant);
  if (a.ninth) l.reason = "forced: the shared expert as a ninth";
  return l;
}

Launch plan_moe_down(const Dispatch& d, const std::string* variant) {
  const auto& a = args_of<LilyMoeArgs>(d);
  check_experts(d, a);
  Launch l = launch(d.kernel, cut(a.H, LILY_ROW_BLOCK), 384);
  weights(l, d, a.a, a.I, a.b, a.S, variant);
  if (!variant) l.reason = "12 simdgroups: 4 quads of rows by 3 shares of the experts";
  return l;
}

Launch plan_moe_gemv(const Dispatch& d, const std::string* variant) {
  const auto& a = args_of<LilyMoeArgs>(d);
  Launch l = launch(d.kernel, a.k * cut(a.I, kGemvRows), kGemvThreads);
  weights(l, d, a.a, a.K, a.a, a.K, variant);
  return l;
}

Launch plan_gdn_step(const Dispatch& d, const std::string*) {
  const auto& a = args_of<LilyGdnArgs>(d);
  if (a.Dk > kMaxHeadDim || a.Dv > kMaxHeadDim || a.Dk % 16 || a.Dv % 16)
    refuse(d, "heads of " + std::to_string(a.Dk) + " x " + std::to_string(a.Dv) + ", expected multiples of 16 up to 256");
  uint32_t slots = 32;
  while (slots < a.Dk) slots *= 2;
  return launch("gdn_step_" + std::to_string(slots), a.Nv, 512);
}

void check_heads(const Dispatch& d, const LilyAttnArgs& a) {
  if (a.D > kMaxHeadDim || a.D % 16 || a.R > a.D || a.R % 2) refuse(d, "head dim " + std::to_string(a.D) + ", " + std::to_string(a.R) + " rotary; expected a multiple of 16 up to 256");
  if (a.Hkv == 0 || a.Hq % a.Hkv) refuse(d, std::to_string(a.Hq) + " query heads over " + std::to_string(a.Hkv) + " key heads");
}

Launch plan_attn_prepare(const Dispatch& d, const std::string*) {
  const auto& a = args_of<LilyAttnArgs>(d);
  check_heads(d, a);
  return launch(d.kernel, a.Hq + a.Hkv, 32);
}

Launch plan_attn_split(const Dispatch& d, const std::string* variant) {
  const auto& a = args_of<LilyAttnArgs>(d);
  check_heads(d, a);
  const bool one = variant && *variant == "one_head";
  const uint32_t ratio = a.Hq / a.Hkv, heads = one ? 1 : 4;
  Launch l = launch(std::string("attn_split_h") + (one ? "1" : "4") + (a.D <= 64 ? "_d64" : a.D <= 128 ? "_d128" : "_d256"), cut(ratio, heads), 256);
  l.grid = {cut(ratio, heads), a.Hkv, a.n_splits};
  l.reason = one ? "forced: a query head a threadgroup" : "up to 4 query heads share each key and value row";
  return l;
}

Launch plan_attn_split_long(const Dispatch& d, const std::string* variant) {
  const auto& a = args_of<LilyAttnArgs>(d);
  check_heads(d, a);
  if (variant) {
    Launch l = plan_attn_split(d, nullptr);
    l.reason = "forced: the form for short contexts";
    return l;
  }
  if (a.D != 256 || a.Hq != 8 * a.Hkv || a.n_splits != LILY_MAX_SPLITS) refuse(d, "needs head dim 256, 8 query heads a key head and 64 splits");
  Launch l = launch(d.kernel, a.Hkv, 512);
  l.grid[1] = LILY_MAX_SPLITS;
  l.reason = "8 query heads share each key and value row; splits share the context evenly";
  return l;
}

Launch plan_attn_combine(const Dispatch& d, const std::string*) {
  const auto& a = args_of<LilyAttnArgs>(d);
  check_heads(d, a);
  if (a.n_splits > LILY_MAX_SPLITS) refuse(d, std::to_string(a.n_splits) + " splits, at most " + std::to_string(LILY_MAX_SPLITS));
  return launch(d.kernel, a.Hq, cut(a.D, 32) * 32);
}

Launch plan_embed(const Dispatch& d, const std::string*) {
  const auto& a = args_of<LilyEmbedArgs>(d);
  const bool step = d.kernel == "embed_step";
  Launch l = launch(d.kernel, step ? 1 : d.rows, step ? 512 : 256);
  weights(l, d, a.fmt, a.H, a.fmt, a.H, nullptr);
  l.reason.clear();
  return l;
}

Launch plan_norm(const Dispatch& d, const std::string*) {
  const auto& a = args_of<LilyNormArgs>(d);
  if (a.H > kLargestH || a.H % LILY_SSQ_BLOCK) refuse(d, "rows of " + std::to_string(a.H) + " values, expected a multiple of 16 up to " + std::to_string(kLargestH));
  const bool one = d.kernel == "norm_final" || d.kernel == "residual_step";
  return launch(d.kernel, one ? 1 : d.rows, 256);
}

Launch plan_sample(const Dispatch& d, const std::string*) {
  const auto& a = args_of<LilySampleArgs>(d);
  if (a.V == 0 || a.V > 1u << 24) refuse(d, "a vocabulary of " + std::to_string(a.V) + ", expected at most 2^24");
  return launch(d.kernel, d.kernel == "sample_draw" ? 1 : a.blocks, 1024);
}

Launch plan_score_rows(const Dispatch& d, const std::string*) { return launch(d.kernel, 64, 1024); }

}  // namespace

const std::vector<LaunchEntry>& decode_launches() {
  static const std::vector<LaunchEntry> entries = {
      {"gemv", plan_gemv, {"read"}},
      {"gemv_norm", plan_gemv, {"read"}},
      {"gemv_residual", plan_gemv, {"read"}},
      {"gate_up_norm", plan_gate_up_norm, {"read"}},
      {"moe_gate_up", plan_moe_gate_up, {"read", "ninth"}},
      {"moe_down", plan_moe_down, {"read"}},
      {"moe_gemv", plan_moe_gemv, {"read"}},
      {"gdn_step", plan_gdn_step, {}},
      {"attn_prepare", plan_attn_prepare, {}},
      {"attn_split", plan_attn_split, {"one_head"}},
      {"attn_split_long", plan_attn_split_long, {"general"}},
      {"attn_combine", plan_attn_combine, {}},
      {"embed_step", plan_embed, {}},
      {"embed_rows", plan_embed, {}},
      {"rmsnorm_rows", plan_norm, {}},
      {"norm_final", plan_norm, {}},
      {"residual_rows", plan_norm, {}},
      {"residual_norm_rows", plan_norm, {}},
      {"residual_step", plan_norm, {}},
      {"take_rows", plan_norm, {}},
      {"sample_adjust", plan_sample, {}},
      {"sample_mass", plan_sample, {}},
      {"sample_draw", plan_sample, {}},
      {"score_rows", plan_score_rows, {}},
  };
  return entries;
}

}  // namespace lily
