// The simulator as a device: the Metal kernels run on the CPU, each thread a fibre, with every access checked.
#pragma once
#include "device/device.hpp"

namespace lily {

DevicePtr make_sim_device(DType storage);  // DeviceError when LILY_SIM names no usable library
DeviceInfo sim_device_info(DType storage);
bool sim_device_configured();  // LILY_SIM is set

}  // namespace lily
