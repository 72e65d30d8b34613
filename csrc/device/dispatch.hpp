// One launch of a kernel over symbolic buffers, as the recorder writes it and every device reads it.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "base/dtype.hpp"

namespace lily {

enum class Access : uint8_t { read, write, read_write };

using Symbol = uint32_t;
constexpr Symbol kNoSymbol = 0xffffffffu;

// A byte range of a symbolic buffer. An absent buffer has kNoSymbol and reaches the kernel as null.
struct BufferUse {
  Symbol symbol = kNoSymbol;
  uint64_t offset = 0, bytes = 0;
  Access access = Access::read;
};

// An output that a trace stores: the name it gets, which use it is, its element type.
struct TraceTag {
  std::string name;
  int use;
  DType dtype;
};

struct Dispatch {
  std::string kernel;  // name in metal/include/args.h
  std::string format;  // of its weights, for people: "q4g64"
  std::string label;   // where in the model: "layers.3.mlp.down"
  std::string reason;  // why this variant was chosen
  std::vector<BufferUse> uses;
  std::vector<uint8_t> args;
  uint32_t groups = 0;         // threadgroups of the CPU's grid
  uint32_t rows = 1;           // row bucket of the program: 1 in decode
  bool even = true;            // its threadgroups do about the same work
  int indirect = -1;           // the use that holds a GPU's grid u32[3], written by an earlier dispatch
  uint64_t bytes_read = 0;     // estimate of the traffic, experts counted by how many are chosen
  uint64_t bytes_written = 0;
  std::vector<TraceTag> traces;
};

using Stages = std::vector<std::vector<uint32_t>>;  // indices of dispatches; a barrier stands between stages

}  // namespace lily
