// From source text to pipelines: compiled at run time by the system, no Xcode needed.
#include <algorithm>

#include "base/error.hpp"
#include "base/thread.hpp"
#include "device/metal/gpu.hpp"

namespace lily::metal {
namespace {

constexpr uint64_t kLanguage31 = (3u << 16) + 1, kLanguage40 = 4u << 16;
constexpr int64_t kMathSafe = 0, kFunctionsPrecise = 1;
constexpr uint64_t kNoOptions = 0;
constexpr int kCompilers = 4;  // libraries compiled side by side

uint64_t data_type(ConstantType type) {  // MTLDataType
  switch (type) {
    case ConstantType::boolean: return 53;
    case ConstantType::unsigned_int: return 33;
    case ConstantType::signed_int: return 29;
    default: return 3;
  }
}

}  // namespace

Gpu::Library& Gpu::library_of(const std::string& function) {
  auto found = functions_.find(function);
  if (found == functions_.end()) throw DeviceError("no kernel source has a function '" + function + "'; reinstall lily-inference");
  return *found->second;
}

// Once for each library; a failure is kept and told to everyone who asks.
void Gpu::build(Library& l) {
  refuse_fork();
  std::call_once(l.once, [&] {
    Pool pool(m);
    Owned options(m, m.init_options(m.alloc_options(m.class_named("MTLCompileOptions"))));
    // The default is the language of the SDK that a program was linked with, and this one has none.
    m.set_language_version(options.get(), l.source.tensor ? kLanguage40 : kLanguage31);
    if (m.responds(options.get(), "setMathMode:")) {
      m.set_math_mode(options.get(), kMathSafe);
      m.set_math_functions(options.get(), kFunctionsPrecise);  // the default is fast, also in safe mode
    } else {
      m.set_fast_math(options.get(), false);
    }
    Object error = nullptr;
    l.library = Owned(m, m.new_library(device_.get(), string_of(m, l.source.text), options.get(), &error));
    if (!l.library) l.failure = l.source.name + " was refused by the Metal compiler: " + describe(m, error);
  });
}

void Gpu::compile(const std::vector<Launch>& launches) {
  std::vector<Library*> wanted;
  for (const Launch& l : launches) {
    Library* library = &library_of(l.function);
    if (std::find(wanted.begin(), wanted.end(), library) == wanted.end()) wanted.push_back(library);
  }
  std::atomic<size_t> next{0};
  auto work = [&] {
    for (size_t i; (i = next.fetch_add(1)) < wanted.size();) build(*wanted[i]);
  };
  std::vector<Thread> threads;
  try {
    for (size_t t = 1; t < std::min<size_t>(kCompilers, wanted.size()); t++) threads.emplace_back(work);
  } catch (const DeviceError&) {  // no more threads: those that there are do the work
  }
  work();
  for (Thread& t : threads) t.join();
  for (Library* l : wanted)
    if (!l->library) throw DeviceError(l->failure);
}

std::string Gpu::compile_tensor() {
  for (auto& l : libraries_) {
    if (!l->source.tensor) continue;
    build(*l);
    if (!l->library) return l->failure;
  }
  return "";
}

Object Gpu::pipeline(const Launch& launch) {
  std::string key = launch.function + "/" + std::to_string(launch.threads);
  for (uint32_t c : launch.constants) key += "," + std::to_string(c);
  refuse_fork();
  std::lock_guard<std::mutex> lock(pipeline_mutex_);
  auto found = pipelines_.find(key);
  if (found == pipelines_.end()) {
    Library& library = library_of(launch.function);
    build(library);
    if (!library.library) throw DeviceError(library.failure);
    found = pipelines_.emplace(key, make_pipeline(launch, library)).first;
  }
  return found->second.get();
}

Owned Gpu::make_pipeline(const Launch& launch, Library& library) {
  Pool pool(m);
  Owned constants(m, m.init_constants(m.alloc_constants(m.class_named("MTLFunctionConstantValues"))));
  for (uint32_t i = 0; i < launch.constants.size(); i++) {
    auto type = library.source.constants.find(i);
    if (type == library.source.constants.end()) continue;  // of another kernel of the family
    const uint32_t value = launch.constants[i];
    const bool truth = value != 0;
    m.set_constant(constants.get(), type->second == ConstantType::boolean ? static_cast<const void*>(&truth) : &value, data_type(type->second), i);
  }
  Object error = nullptr;
  Owned function(m, m.new_function(library.library.get(), string_of(m, launch.function), constants.get(), &error));
  if (!function) throw DeviceError("kernel " + launch.function + " of " + library.source.name + " could not be specialised: " + describe(m, error));
  Owned descriptor(m, m.init_pipeline(m.alloc_pipeline(m.class_named("MTLComputePipelineDescriptor"))));
  m.set_compute_function(descriptor.get(), function.get());
  m.set_max_threads(descriptor.get(), launch.threads);
  m.set_whole_simdgroups(descriptor.get(), true);
  Owned made(m, m.new_pipeline(device_.get(), descriptor.get(), kNoOptions, nullptr, &error));
  if (!made) throw DeviceError("kernel " + launch.function + " gave no pipeline: " + describe(m, error));
  const uint64_t threads = m.max_threads(made.get()), width = m.simdgroup_width(made.get()), memory = m.threadgroup_memory(made.get());
  if (threads < launch.threads || width != 32 || memory > limits_.threadgroup_memory)
    throw DeviceError("kernel " + launch.function + " does not fit the GPU " + limits_.name + ": " + std::to_string(threads) + " threads of " + std::to_string(launch.threads) + ", simdgroups of " +
                      std::to_string(width) + ", " + std::to_string(memory) + " of " + std::to_string(limits_.threadgroup_memory) + " bytes of threadgroup memory");
  return made;
}

}  // namespace lily::metal
