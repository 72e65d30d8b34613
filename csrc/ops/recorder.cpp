#include "ops/recorder.hpp"

#include <cstdlib>

#include "base/error.hpp"

namespace lily {

std::string Linear::format_name() const {
  switch (format.kind) {
    case LILY_W_AFFINE: return "q" + std::to_string(format.bits) + "g" + std::to_string(format.group);
    case LILY_W_BF16: return "bf16";
    case LILY_W_F16: return "f16";
    default: return "f32";
  }
}

Policy Policy::from_environment() {
  const char* text = std::getenv("LILY_PLAN");
  if (!text || !*text) return {};
  std::string plan = text;
  if (plan == "fused") return {true, "forced by LILY_PLAN"};
  if (plan == "unfused") return {false, "forced by LILY_PLAN"};
  throw InvalidArgument("LILY_PLAN is '" + plan + "', expected fused or unfused");
}

// Both sides of the contract must lay these out alike.
static_assert(sizeof(LilyFormat) == 12 && sizeof(LilyStep) == 48 && sizeof(LilySegment) == 12);
static_assert(sizeof(LilySample) == 12 * 4 + 8 + 2 * 4 * LILY_MAX_LOGPROBS);
static_assert(sizeof(LilyGemvArgs) == 12 + 12 + 4 * 12);

}  // namespace lily
