// A stand-in for Metal: objects that count their references, every message recorded and checked, command buffers run on the simulator.
#pragma once
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "../../csrc/device/metal/messages.hpp"

namespace lily_standin {

using lily::metal::CompletedFn;
using lily::metal::MtlSize;
using lily::metal::Touched;

// Nothing is deleted: a message to an object that was released is recognised.
struct Obj {
  explicit Obj(std::string class_name) : cls(std::move(class_name)) {}
  virtual ~Obj() = default;
  std::string cls, name;
  int refs = 1;
};
struct Str : Obj {
  explicit Str(std::string t) : Obj("NSString"), text(std::move(t)) {}
  std::string text;
};
struct Err : Obj {
  Err(std::string d, std::string dom, int64_t c) : Obj("NSError"), description(std::move(d)), domain(std::move(dom)), code(c) {}
  Str description, domain;
  int64_t code;
};
struct Buf : Obj {
  Buf() : Obj("MTLBuffer") {}
  ~Buf() override;
  uint8_t* data = nullptr;
  uint64_t length = 0;
  int uses = 0;  // command buffers that were committed and have not ended
};
struct ResidencySet : Obj {
  ResidencySet() : Obj("MTLResidencySet") {}
  std::set<Buf*> pending, resident;
  bool requested = false;
};
struct Options : Obj {
  Options() : Obj("MTLCompileOptions") {}
  uint64_t language = 0;
  int64_t math = 2, functions = 0;  // relaxed or fast, fast: what a program gets that asks for nothing
};
struct Library : Obj {
  Library() : Obj("MTLLibrary") {}
  std::string source;
  bool float32 = false;
};
struct Constants : Obj {
  Constants() : Obj("MTLFunctionConstantValues") {}
  std::map<uint64_t, std::pair<uint64_t, uint32_t>> values;  // index: type, bits
};
struct Function : Obj {
  Function() : Obj("MTLFunction") {}
  std::string host_name;
  std::vector<uint32_t> constants;
  bool float32 = false;
};
struct PipelineDescriptor : Obj {
  PipelineDescriptor() : Obj("MTLComputePipelineDescriptor") {}
  Function* function = nullptr;
  uint64_t threads = 0;
  bool whole = false;
};
struct Pipeline : Obj {
  Pipeline() : Obj("MTLComputePipelineState") {}
  std::string function;
  std::vector<uint32_t> constants;
  uint64_t threads = 0;
  int uses = 0;  // command buffers that were committed and have not ended
  bool float32 = false;
};
struct Command {
  bool barrier = false;
  Pipeline* pipeline = nullptr;
  Buf* buffers[20] = {};
  uint64_t offsets[20] = {}, bytes[20] = {};
  uint32_t reads = 0, writes = 0, present = 0;
  std::string label, args;
  Buf* indirect = nullptr;
  uint64_t indirect_offset = 0;
  uint32_t grid[3] = {};
  uint32_t threads = 0;
};
struct Pass {
  bool concurrent = false;
  std::vector<Command> commands;
};
struct Queue : Obj {
  Queue() : Obj("MTLCommandQueue") {}
  std::vector<ResidencySet*> sets;
  uint64_t limit = 64;
  int outstanding = 0;
};
struct CommandBuffer : Obj {
  CommandBuffer() : Obj("MTLCommandBuffer") {}
  Queue* queue = nullptr;
  std::vector<Pass> passes;
  bool open_pass = false;
  uint64_t status = 0;
  Err* error = nullptr;
  double start = 0, end = 0;
  std::vector<std::pair<CompletedFn, void*>> handlers;
  std::string fault;
};
struct Encoder : Obj {
  Encoder() : Obj("MTLComputeCommandEncoder") {}
  CommandBuffer* buffer = nullptr;
  bool ended = false;
  Pipeline* pipeline = nullptr;
  Buf* buffers[31] = {};
  uint64_t offsets[31] = {};
  std::string bytes[31];
  Touched touched{};
  std::string label;
  bool annotated = false;
};

struct Fault {
  std::string selector, action;
  int nth;  // 0: the next one
};

// Everything there is, under one mutex that is not held while kernels run.
struct World {
  std::recursive_mutex mutex;
  std::map<std::string, double> properties;
  std::vector<Fault> faults;
  bool recording = false;
  std::vector<std::string> log;
  std::vector<std::string> complaints;
  std::map<std::string, uint64_t> sent;       // by selector
  std::map<std::string, int> named;           // objects by class, for their names
  std::vector<Obj*> objects;

  double property(const std::string& name, double otherwise) const {
    auto found = properties.find(name);
    return found == properties.end() ? otherwise : found->second;
  }
  void complain(const std::string& text) {
    if (complaints.size() < 100) complaints.push_back(text);
  }
};
World& world();

void submit(CommandBuffer* buffer);  // to the GPU's thread, in order

}  // namespace lily_standin
