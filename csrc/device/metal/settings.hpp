// What the environment asks of the Metal device: comparisons and tests.
#pragma once

namespace lily::metal {

struct Settings {
  bool concurrent = true;        // LILY_METAL_ENCODER=concurrent|serial
  int in_flight = 2;             // LILY_METAL_IN_FLIGHT=1|2: command buffers on the GPU, short ones not counted; 1 waits for each
  double slice = 0.25;           // LILY_METAL_SLICE: seconds that one command buffer is meant to take; macOS ends those of some seconds
  double timeout = 60;           // LILY_METAL_TIMEOUT: seconds without an answer after which the GPU counts as lost
  enum class Tensor { automatic, on, off } tensor = Tensor::automatic;  // LILY_METAL_TENSOR=auto|on|off; on skips the check of the GPU's family
  bool host_grids = false;       // LILY_INDIRECT=device|host
  static Settings from_environment();  // DeviceError
};

}  // namespace lily::metal
