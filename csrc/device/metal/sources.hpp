// The shipped kernel sources as Apple's compiler takes them: headers in place, instantiations spelt out.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace lily::metal {

enum class ConstantType { boolean, unsigned_int, signed_int, real };

struct KernelSource {
  std::string name;                            // metal/decode/gemv.metal
  std::string text;
  std::vector<std::string> functions;          // host names
  std::map<uint32_t, ConstantType> constants;  // function constants by index
  bool tensor = false;                         // needs Metal 4 and a GPU with matrix units: compiled apart
};

// The folder `metal`: what set_kernel_root was given, else the one beside this library. DeviceError when it holds no kernels.
void set_kernel_root(const std::string& folder);
std::string kernel_root();

// Every source, in order of its name. float32: activations are stored as float32. DeviceError for a file that cannot be read.
std::vector<KernelSource> load_sources(bool float32);

}  // namespace lily::metal
