// The CPU as a device: one worker thread owns the queue, a stage is one parallel region over its threadgroups.
#pragma once
#include <string>

#include "device/cpu/kernel.hpp"
#include "device/device.hpp"

namespace lily {

DevicePtr make_cpu_device(DType storage);
DeviceInfo cpu_device_info(DType storage);

// Instruction sets this machine can run, best first: "amx", "avx512", "avx2", "portable". "amx" is AVX-512 with matrix products on tiles.
const std::vector<std::string>& cpu_instruction_sets();
// Those, and "amx-emulated" where there is AVX-512: the code of "amx" with its tiles in memory, for tests.
std::vector<std::string> cpu_variants();
// InvalidArgument when the kernel or the instruction set is unknown here.
cpu::KernelFn find_cpu_kernel(const std::string& name, const std::string& isa, DType storage);
std::vector<std::string> cpu_kernel_names();
// The instruction set for a kernel and why: LILY_KERNEL=name=isa[,name=isa], "*" for all, else the best one. DeviceError for an illegal choice.
struct CpuChoice {
  std::string isa, reason;
};
CpuChoice choose_cpu_kernel(const std::string& name);

}  // namespace lily
