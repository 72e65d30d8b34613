// A prepared program, and how its stages become one command buffer.
#pragma once
#include "device/metal/gpu.hpp"

namespace lily::metal {

struct MetalProgram : Prepared {
  std::vector<Dispatch> dispatches;
  Stages stages;
  std::vector<Launch> launches;     // per dispatch
  std::vector<Object> pipelines;    // of the GPU
  std::vector<double> seconds;      // per stage, at most, before what was measured corrects it
};

// Makes pipelines and estimates. DeviceError for a kernel that does not compile or fit.
std::shared_ptr<const MetalProgram> prepare_program(Gpu& gpu, const Tuning& tuning, std::vector<Dispatch> dispatches, Stages stages);

struct EncodeOptions {
  bool concurrent = true;  // one pass whose dispatches overlap but for barriers between stages; false: one after the other
  bool host_grids = false; // grids of indirect dispatches are read by the host, which has waited for what writes them
};

// Encodes stages [begin, end) into an encoder of this command buffer and ends it. Returns how many grids the host read. GPUError when Metal gives no encoder.
uint32_t encode_stages(const Messages& m, Object command_buffer, const MetalProgram& program, const Stages& stages, size_t begin, size_t end, const BindingSet& bindings,
                       const EncodeOptions& options);

}  // namespace lily::metal
