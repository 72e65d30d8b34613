// The GPU of a Mac as a device.
#pragma once
#include "device/device.hpp"

namespace lily {

DevicePtr make_metal_device(DType storage);        // DeviceError where there is no GPU that Lily can use
std::vector<DeviceInfo> metal_device_infos();      // empty there
std::string metal_missing();                       // why it is empty; "" when it is not

}  // namespace lily
