// What the ops write into: one program, the activation storage of its device, and the policy that chose the variants.
#pragma once
#include <cstring>
#include <span>
#include <string>
#include <type_traits>

#include "args.h"
#include "graph/program.hpp"

namespace lily {

// A linear weight as the recorder sees it: shape, format and symbols; where its bytes are is bound later.
struct Linear {
  std::string name;
  LilyFormat format{};
  uint32_t rows = 0, cols = 0;
  uint32_t experts = 1, expert_stride = 0;  // rows from one expert to the next
  Symbol codes = kNoSymbol, scales = kNoSymbol, biases = kNoSymbol;
  uint64_t offset = 0;  // of the codes in their symbol: 0 in a checkpoint, elsewhere in the workspace

  bool affine() const { return format.kind == LILY_W_AFFINE; }
  uint64_t row_bytes() const {
    if (affine()) return uint64_t(cols) * format.bits / 8;
    return uint64_t(cols) * (format.kind == LILY_W_F32 ? 4 : 2);
  }
  uint64_t row_groups() const { return affine() ? cols / format.group : 0; }
  // rows that the file holds from the first expert's first row to the last expert's last
  uint64_t span_rows() const { return uint64_t(experts - 1) * expert_stride + rows; }
  uint64_t matrix_bytes() const { return uint64_t(rows) * (row_bytes() + row_groups() * 4); }  // one expert
  std::string format_name() const;
};

struct Vector {
  Symbol symbol = kNoSymbol;
  uint32_t size = 0;  // floats
  BufferUse read() const { return {symbol, 0, uint64_t(size) * 4, Access::read}; }
};

// Which of two equal forms a device runs: policy, never legality.
struct Policy {
  bool fused = true;
  std::string reason = "default: fused";
  DeviceTraits traits{};  // what the device wants of its programs
  static Policy from_environment();  // LILY_PLAN=fused|unfused; InvalidArgument
};

struct Recorder {
  Program& program;
  DType storage;
  Policy policy;
  uint64_t act_bytes() const { return dtype_bytes(storage); }
  Slot acts(const std::string& name, uint64_t n) { return program.workspace(name, n * act_bytes()); }
  Slot floats(const std::string& name, uint64_t n) { return program.workspace(name, n * 4); }
  Slot words(const std::string& name, uint64_t n) { return program.workspace(name, n * 4); }
};

// A range whose end the recorder does not know: an arena that grows.
constexpr uint64_t kUnbounded = 1ull << 62;

// Builds a dispatch from an argument struct and its buffers.
template <class Args>
Dispatch make_dispatch(const char* kernel, const std::string& label, const Args& args, std::vector<BufferUse> uses, uint64_t groups) {
  static_assert(std::is_trivially_copyable_v<Args> && sizeof(Args) % 4 == 0);
  Dispatch d;
  d.kernel = kernel;
  d.label = label;
  d.args.resize(sizeof(Args));
  std::memcpy(d.args.data(), &args, sizeof(Args));
  d.groups = uint32_t(groups);
  for (const BufferUse& use : uses) {
    if (use.symbol == kNoSymbol || use.bytes >= kUnbounded) continue;  // K and V depend on the context
    if (use.access != Access::write) d.bytes_read += use.bytes;
    if (use.access != Access::read) d.bytes_written += use.bytes;
  }
  d.uses = std::move(uses);
  return d;
}

// The three buffers of a linear weight, in contract order.
inline void push_weight(std::vector<BufferUse>& uses, const Linear& w) {
  uses.push_back({w.codes, w.offset, w.span_rows() * w.row_bytes(), Access::read});
  if (w.affine()) {
    uint64_t bytes = w.span_rows() * w.row_groups() * 2;
    uses.push_back({w.scales, 0, bytes, Access::read});
    uses.push_back({w.biases, 0, bytes, Access::read});
  } else {
    uses.push_back({});
    uses.push_back({});
  }
}

inline uint32_t blocks(uint64_t n, uint64_t size) { return uint32_t((n + size - 1) / size); }

inline void traced(Dispatch& d, const std::string& name, int use, DType dtype = DType::f32) { d.traces.push_back({name, use, dtype}); }

}  // namespace lily
