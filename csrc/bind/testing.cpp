#include "bind/testing.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <map>

#include "bind/convert.hpp"
#include "bind/types.hpp"
#include "device/cpu/cpu_device.hpp"
#include "device/metal/tensor_choice.hpp"
#include "device/shader/estimate.hpp"
#include "device/sim/sim_library.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace lily::bind {
namespace {

// n values of a stored type as float32.
std::vector<float> floats(const uint8_t* data, uint64_t n, DType dtype) {
  std::vector<float> out(n);
  for (uint64_t i = 0; i < n; i++) {
    if (dtype == DType::bf16) {
      uint16_t h;
      std::memcpy(&h, data + 2 * i, 2);
      out[i] = bf16_to_f32(h);
    } else {
      uint32_t u;
      std::memcpy(&u, data + 4 * i, 4);
      if (dtype == DType::f32)
        std::memcpy(&out[i], &u, 4);
      else
        out[i] = float(u);
    }
  }
  return out;
}

nb::object array(const std::vector<float>& values) { return copy_array<float>(values.data(), values.size()); }

nb::dict trace(NativeModel& m, nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> ids) {
  auto session = std::make_shared<Session>(m.get());
  std::vector<std::pair<std::string, std::vector<float>>> found;
  {
    nb::gil_scoped_release release;
    session->trace(ids.data(), ids.size(), [&](const TraceTag& tag, const uint8_t* data, uint64_t bytes) {
      found.emplace_back(tag.name, floats(data, bytes / dtype_bytes(tag.dtype), tag.dtype));
    });
  }
  nb::dict result;
  for (auto& [name, values] : found) result[nb::str(name.c_str())] = array(values);
  return result;
}

// conv rows [3, C] and recurrent state [Nv, Dk, Dv] per linear layer, K and V [tokens, Hkv, D] per attention layer, all flat float32.
nb::dict state(NativeSession& s) {
  std::shared_ptr<Session> held = s.get();
  const Session& session = *held;
  if (session.busy()) throw InvalidArgument("session is busy");
  const Model& model = session.engine()->model();
  nb::dict result;
  if (!session.state()) return result;
  const uint8_t* base = (*session.state())->host();
  const AttentionShape a = model.spec.attention();
  for (uint32_t i = 0; i < model.spec.num_layers; i++) {
    const LayerWeights& l = model.weights.layers[i];
    std::string name = "layers." + std::to_string(i) + ".";
    if (!l.attention) {
      const uint64_t conv = model.state.conv_bytes / dtype_bytes(model.storage);
      result[nb::str((name + "conv_state").c_str())] = array(floats(base + model.state.conv[l.index], conv, model.storage));
      result[nb::str((name + "recurrent_state").c_str())] = array(floats(base + model.state.recurrent[l.index], model.state.recurrent_bytes / 4, DType::f32));
      continue;
    }
    KvCache& kv = session.engine()->kv();
    const uint64_t row = uint64_t(a.D) * dtype_bytes(model.storage);
    for (bool keys : {true, false}) {
      const uint8_t* arena = (keys ? kv.k(l.index) : kv.v(l.index))->host();
      std::vector<float> rows;
      for (uint32_t t = 0; t < session.consumed(); t++)
        for (uint32_t head = 0; head < a.Hkv; head++) {
          uint64_t block = session.kv_blocks()[t / LILY_KV_BLOCK]->index();
          auto one = floats(arena + ((block * a.Hkv + head) * LILY_KV_BLOCK + t % LILY_KV_BLOCK) * row, a.D, model.storage);
          rows.insert(rows.end(), one.begin(), one.end());
        }
      result[nb::str((name + (keys ? "keys" : "values")).c_str())] = array(rows);
    }
  }
  result["hidden"] = array(floats(base + model.state.hidden, model.spec.hidden_size, DType::f32));
  return result;
}

void run_kernel(const std::string& name, const std::string& isa, const std::string& storage, nb::bytes args, nb::list buffers, uint32_t begin, uint32_t end) {
  if (storage != "bfloat16" && storage != "float32") throw InvalidArgument("storage is '" + storage + "', expected bfloat16 or float32");
  cpu::KernelFn fn = find_cpu_kernel(name, isa == "best" ? cpu_instruction_sets().front() : isa, storage == "float32" ? DType::f32 : DType::bf16);
  std::vector<nb::ndarray<nb::c_contig, nb::device::cpu>> held;
  std::vector<void*> pointers;
  for (nb::handle h : buffers) {
    if (h.is_none()) {
      pointers.push_back(nullptr);
      continue;
    }
    held.push_back(nb::cast<nb::ndarray<nb::c_contig, nb::device::cpu>>(h));
    pointers.push_back(held.back().data());
  }
  std::string copy(args.c_str(), args.size());
  nb::gil_scoped_release release;
  fn({copy.data(), pointers.data()}, begin, end);
}

// One dispatch on the simulator, its accesses checked against the exact arrays. `access`: r, w or b (both) per buffer. Returns its counters.
nb::dict run_sim(const std::string& name, const std::string& storage, nb::bytes args, nb::list buffers, const std::string& access, uint32_t groups, uint32_t rows, int indirect,
                 const std::string& variant, uint64_t seed) {
  if (storage != "bfloat16" && storage != "float32") throw InvalidArgument("storage is '" + storage + "', expected bfloat16 or float32");
  if (access.size() != buffers.size()) throw InvalidArgument("access has " + std::to_string(access.size()) + " letters for " + std::to_string(buffers.size()) + " buffers");
  Dispatch d;
  d.kernel = d.label = name;
  d.args.assign(args.c_str(), args.c_str() + args.size());
  d.groups = groups;
  d.rows = rows;
  d.indirect = indirect;
  std::vector<nb::ndarray<nb::c_contig, nb::device::cpu>> held;
  std::vector<SimRange> ranges;
  std::vector<std::string> names;
  for (size_t i = 0; i < buffers.size(); i++) {
    BufferUse use;
    use.access = access[i] == 'r' ? Access::read : access[i] == 'w' ? Access::write : Access::read_write;
    d.uses.push_back(use);
    names.push_back("buffer " + std::to_string(i));
    if (buffers[i].is_none()) {
      ranges.push_back({});
      continue;
    }
    held.push_back(nb::cast<nb::ndarray<nb::c_contig, nb::device::cpu>>(buffers[i]));
    ranges.push_back({static_cast<uint8_t*>(held.back().data()), held.back().nbytes()});
  }
  static std::map<std::string, std::shared_ptr<SimLibrary>> libraries;
  auto& library = libraries[storage];
  if (!library) library = SimLibrary::open(storage == "float32" ? DType::f32 : DType::bf16);
  Tuning tuning = Tuning::from_environment();
  if (!variant.empty()) tuning.forced = {{name, variant}};
  Launch launch = plan_launch(d, tuning);
  library->set(true, seed, true);
  library->barrier();
  {
    nb::gil_scoped_release release;
    library->launch(d, launch, ranges, names);
  }
  const LilySimCounters* c = library->counters();
  nb::dict result, traffic;
  for (uint32_t i = 0; i < c->n_traffic; i++) {
    const LilySimTraffic& t = c->traffic[i];
    nb::dict one;
    one["bytes_read"] = t.bytes_read;
    one["bytes_written"] = t.bytes_written;
    one["unique_bytes_read"] = t.unique_bytes_read;
    one["unique_bytes_written"] = t.unique_bytes_written;
    one["transactions"] = t.transactions;
    one["useful_bytes"] = t.useful_bytes;
    traffic[nb::str(t.name)] = one;
  }
  result["function"] = launch.function;
  result["threadgroups"] = c->threadgroups;
  result["barriers"] = c->barriers;
  result["threadgroup_bytes"] = c->threadgroup_bytes;
  result["traffic"] = traffic;
  return result;
}

// The stage that takes longest, at most, of a chunk's and of a decode step's programs: seconds, as a GPU device prices them. rows 0: the default chunk.
std::tuple<double, double, uint32_t> longest_stages(nb::dict spec, nb::list weights, const std::string& device, uint32_t rows, uint32_t context) {
  Policy policy = Policy::from_environment();
  policy.traits = device_traits(device);
  Model model(spec_from(spec), weights_from(weights), DType::bf16);
  if (!rows) rows = Engine::default_chunk(model, policy);
  auto longest = [](const Program& p) { return std::ranges::max(estimate_stages(p.dispatches(), p.stages())); };
  return {std::max(longest(model.prefill(rows, false, context, policy)), longest(model.head_rows(64, false))), longest(model.decode(context, policy)), rows};
}

}  // namespace

void define_testing(nb::module_& m) {
  nb::module_ t = m.def_submodule("testing", "Hooks for tests; not a stable interface.");
  t.def("fail_at", [](NativeModel& m, int step, int stage) { m.get()->device()->fail_at(step, stage); }, "model"_a, "step"_a, "stage"_a);
  t.def("run_sim", &run_sim, "name"_a, "storage"_a, "args"_a, "buffers"_a, "access"_a, "groups"_a, "rows"_a, "indirect"_a = -1, "variant"_a = "", "seed"_a = 0);
  t.def("launch_kernels", &launch_kernels);
  t.def("forget_tensor_choice", &metal::forget_tensor_choice);
  t.def("longest_stages", &longest_stages, "spec"_a, "weights"_a, "device"_a, "rows"_a, "context"_a);
  t.def("metal_bytes", &metal::process_bytes, "What the models of this process hold on their GPUs.");
  t.def("metal_sources", [](bool float32) {
    nb::list out;
    for (const metal::KernelSource& s : metal::load_sources(float32)) out.append(nb::make_tuple(s.name, s.text, s.functions, s.tensor));
    return out;
  }, "float32"_a = false, "The kernel sources as Apple's compiler is given them: (name, text, functions, whether they need tensor operations).");
  t.def("set_schedule", [](NativeModel& m, const std::string& text) { m.get()->set_schedule(Schedule::parse(text)); }, "model"_a, "schedule"_a);
  t.def("set_regular_snapshots", [](NativeModel& m, bool on) { m.get()->set_regular_snapshots(on); }, "model"_a, "on"_a);
  t.def("trace", &trace, "model"_a, "ids"_a);
  t.def("state", &state, "session"_a);
  t.def("counters", [](NativeModel& m) {
    Counters c = m.get()->device()->counters();
    nb::dict d;
    d["submissions"] = c.submissions;
    d["stages"] = c.stages;
    d["dispatches"] = c.dispatches;
    d["host_reads"] = c.host_reads;
    return d;
  }, "model"_a);
  t.def("instruction_sets", [] { return cpu_instruction_sets(); });
  t.def("variants", [] { return cpu_variants(); });
  t.def("kernels", [] { return cpu_kernel_names(); });
  t.def("run_kernel", &run_kernel, "name"_a, "isa"_a, "storage"_a, "args"_a, "buffers"_a, "begin"_a, "end"_a);
}

}  // namespace lily::bind
