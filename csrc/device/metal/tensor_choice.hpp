// Whether this GPU's matrix units do the products of prefill: asked of the system, then proven on the GPU itself.
#pragma once
#include <functional>
#include <optional>
#include <string>

#include "device/device.hpp"
#include "device/metal/gpu.hpp"
#include "device/metal/settings.hpp"

namespace lily::metal {

struct TensorChoice {
  bool use = false;
  bool one_tile = false;  // tiles of 16 and 32 rows gave different bits: every product takes 32
  std::string reason;
  std::string shown() const { return (use ? "tensor operations: on (" : "tensor operations: off (") + reason + ")"; }
};

// Why the GPU or the system has none; "" when it is worth asking.
std::string tensor_gate(const Limits& limits, const Settings& settings);

// Compiles the library, runs products of both tile sizes, whole tiles and parts of one, and compares them with simdgroup_matrix and with float64.
// Never throws for what the GPU does.
TensorChoice examine_tensor(Gpu& gpu, Device& device);
// What holds for a device: the gate, then what `examine` finds, which is asked once a process.
TensorChoice choose_tensor(const Limits& limits, const Settings& settings, DType storage, const std::function<TensorChoice()>& examine);
void forget_tensor_choice();  // for tests

// The products go to the tensor library where nothing else is forced.
void apply(const TensorChoice& choice, Tuning& tuning);

}  // namespace lily::metal
