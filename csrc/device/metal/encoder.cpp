#include "device/metal/encoder.hpp"

#include <algorithm>
#include <array>
#include <cstring>

#include "base/error.hpp"
#include "device/shader/estimate.hpp"

namespace lily::metal {
namespace {

constexpr uint64_t kSerial = 0, kConcurrent = 1;  // MTLDispatchType
constexpr uint64_t kScopeBuffers = 1;             // MTLBarrierScopeBuffers

// What the encoder already has, so that nothing is said twice.
struct Bound {
  Object pipeline = nullptr;
  std::array<Object, kArgsIndex> buffers{};
  std::array<uint64_t, kArgsIndex> offsets{};
};

class Pass {
 public:
  Pass(const Messages& m, Object encoder) : m_(m), encoder_(encoder) {}
  ~Pass() { m_.end_encoding(encoder_); }  // an encoder must be ended, whatever happens
  Pass(const Pass&) = delete;

  void barrier() { m_.barrier(encoder_, kScopeBuffers); }

  bool dispatch(const MetalProgram& program, uint32_t index, const BindingSet& bindings, bool host_grid) {
    const Dispatch& d = program.dispatches[index];
    const Launch& l = program.launches[index];
    std::array<uint32_t, 3> grid = l.grid;
    const bool indirect = d.indirect >= 0;
    if (indirect && host_grid) {
      const BufferUse& use = d.uses[size_t(d.indirect)];
      const Binding& b = bindings[use.symbol];
      std::memcpy(grid.data(), b.buffer->host() + b.offset + use.offset, sizeof(uint32_t) * 3);
    }
    if (!(indirect && !host_grid) && (grid[0] == 0 || grid[1] == 0 || grid[2] == 0)) return indirect;  // nothing to do; Metal takes no empty grid
    if (bound_.pipeline != program.pipelines[index]) m_.set_pipeline(encoder_, bound_.pipeline = program.pipelines[index]);
    const uint32_t present = bind(d, bindings);
    m_.set_bytes(encoder_, d.args.data(), d.args.size(), kArgsIndex);
    m_.set_bytes(encoder_, &present, sizeof present, kPresentIndex);
    if (m_.annotate) annotate(d, present);
    const MtlSize threads{l.threads, 1, 1};
    if (indirect && !host_grid) {
      const BufferUse& use = d.uses[size_t(d.indirect)];
      const Binding& b = bindings[use.symbol];
      m_.dispatch_indirect(encoder_, b.buffer->handle(), b.offset + use.offset, threads);
    } else {
      m_.dispatch(encoder_, {grid[0], grid[1], grid[2]}, threads);
    }
    return indirect && host_grid;
  }

 private:
  uint32_t bind(const Dispatch& d, const BindingSet& bindings) {
    uint32_t present = 0;
    for (size_t i = 0; i < d.uses.size(); i++) {
      const BufferUse& use = d.uses[i];
      if (use.symbol == kNoSymbol || !bindings[use.symbol].buffer) continue;
      const Binding& b = bindings[use.symbol];
      const Object buffer = b.buffer->handle();
      const uint64_t offset = b.offset + use.offset;
      present |= 1u << i;
      if (bound_.buffers[i] == buffer && bound_.offsets[i] == offset) continue;
      bound_.buffers[i] = buffer;
      bound_.offsets[i] = offset;
      m_.set_buffer(encoder_, buffer, offset, i);
    }
    return present;
  }

  void annotate(const Dispatch& d, uint32_t present) {
    const std::string label = d.kernel + " (" + d.label + ")";
    Touched t{label.c_str(), {}, 0, 0};
    for (size_t i = 0; i < d.uses.size(); i++) {
      if (!(present >> i & 1)) continue;
      t.bytes[i] = d.uses[i].bytes;
      if (d.uses[i].access != Access::read) t.writes |= 1u << i;
      if (d.uses[i].access != Access::write) t.reads |= 1u << i;
    }
    m_.annotate(encoder_, t);
  }

  const Messages& m_;
  Object encoder_;
  Bound bound_;
};

}  // namespace

std::shared_ptr<const MetalProgram> prepare_program(Gpu& gpu, const Tuning& tuning, std::vector<Dispatch> dispatches, Stages stages) {
  auto program = std::make_shared<MetalProgram>();
  for (const Dispatch& d : dispatches) program->launches.push_back(plan_launch(d, tuning));
  gpu.compile(program->launches);
  for (const Launch& l : program->launches) program->pipelines.push_back(gpu.pipeline(l));
  program->seconds = estimate_stages(dispatches, stages);
  program->dispatches = std::move(dispatches);
  program->stages = std::move(stages);
  return program;
}

uint32_t encode_stages(const Messages& m, Object command_buffer, const MetalProgram& program, const Stages& stages, size_t begin, size_t end, const BindingSet& bindings,
                       const EncodeOptions& options) {
  Object encoder = m.compute_encoder(command_buffer, options.concurrent ? kConcurrent : kSerial);
  if (!encoder) throw GPUError(int(begin), "Metal gave no compute encoder");
  Pass pass(m, encoder);
  uint32_t host_grids = 0;
  for (size_t stage = begin; stage < end; stage++) {
    if (stage > begin && options.concurrent) pass.barrier();
    for (uint32_t d : stages[stage]) host_grids += pass.dispatch(program, d, bindings, options.host_grids);
  }
  return host_grids;
}

}  // namespace lily::metal
