#include "device/sim/sim_library.hpp"

#include <cstdlib>
#include <cstring>
#include <dlfcn.h>

#include "base/error.hpp"

namespace lily {
namespace {

template <class F>
void find(void* handle, const char* name, F& out) {
  out = reinterpret_cast<F>(dlsym(handle, name));
  if (!out) throw DeviceError(std::string("the library that LILY_SIM names has no function ") + name + "; build it anew with: python -m tests.sim build");
}

}  // namespace

std::shared_ptr<SimLibrary> SimLibrary::open(DType storage) {
  const char* path = std::getenv("LILY_SIM");
  if (!path || !*path) throw DeviceError("device 'sim' needs LILY_SIM, the path that this command prints last: python -m tests.sim build");
  std::shared_ptr<SimLibrary> s(new SimLibrary());
  s->handle_ = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!s->handle_) throw DeviceError(std::string("LILY_SIM cannot be opened: ") + dlerror() + "; build it with: python -m tests.sim build");
  decltype(&lily_sim_abi) abi;
  decltype(&lily_sim_open) open;
  find(s->handle_, "lily_sim_abi", abi);
  if (abi() != LILY_SIM_ABI)
    throw DeviceError("LILY_SIM has interface version " + std::to_string(abi()) + ", expected " + std::to_string(LILY_SIM_ABI) + "; build it anew with: python -m tests.sim build");
  find(s->handle_, "lily_sim_open", open);
  find(s->handle_, "lily_sim_close", s->close_);
  find(s->handle_, "lily_sim_set", s->set_);
  find(s->handle_, "lily_sim_barrier", s->barrier_);
  find(s->handle_, "lily_sim_launch", s->launch_);
  find(s->handle_, "lily_sim_counters", s->counters_);
  find(s->handle_, "lily_sim_functions", s->functions_);
  s->context_ = open(storage == DType::f32 ? 1 : 0);
  if (!s->context_) throw DeviceError("LILY_SIM was built without this storage; build it anew with: python -m tests.sim build");
  return s;
}

// The library stays open: its threads and static data may outlive this object.
SimLibrary::~SimLibrary() {
  if (context_) close_(context_);
}

void SimLibrary::barrier() { barrier_(context_); }
void SimLibrary::set(bool checking, uint64_t seed, bool counting) { set_(context_, checking, seed, counting); }
const LilySimCounters* SimLibrary::counters() { return counters_(context_); }

std::vector<std::string> SimLibrary::functions() {
  std::vector<std::string> names;
  std::string text = functions_(context_);
  for (size_t at = 0; at < text.size();) {
    size_t end = std::min(text.find('\n', at), text.size());
    if (end > at) names.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  return names;
}

void SimLibrary::launch(const Dispatch& d, const Launch& l, const std::vector<SimRange>& ranges, const std::vector<std::string>& names) {
  std::vector<LilySimBuffer> buffers;
  LilySimLaunch call{};
  for (size_t i = 0; i < d.uses.size(); i++) {
    Access access = d.uses[i].access;
    uint32_t bits = (access != Access::write ? LILY_SIM_READ : 0u) | (access != Access::read ? LILY_SIM_WRITE : 0u);
    buffers.push_back({ranges[i].data, ranges[i].bytes, bits, names[i].c_str()});
    if (ranges[i].data) call.present |= 1u << i;
  }
  call.function = l.function.c_str();
  call.label = d.label.c_str();
  call.constants = l.constants.data();
  call.n_constants = uint32_t(l.constants.size());
  for (int i = 0; i < 3; i++) call.grid[i] = l.grid[i];
  if (d.indirect >= 0) std::memcpy(call.grid, ranges[size_t(d.indirect)].data, sizeof(call.grid));
  call.threads = l.threads;
  call.buffers = buffers.data();
  call.n_buffers = uint32_t(buffers.size());
  call.args = d.args.data();
  call.args_bytes = uint32_t(d.args.size());
  char message[2048] = "";
  if (launch_(context_, &call, message, sizeof(message))) throw DeviceError(d.kernel + " (" + d.label + "): " + message);
}

}  // namespace lily
