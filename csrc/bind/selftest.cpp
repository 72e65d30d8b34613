#include "bind/selftest.hpp"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "args.h"
#include "bind/convert.hpp"
#include "bind/types.hpp"
#include "device/shader/launch.hpp"
#include "engine/session.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace lily::bind {
namespace {

using Clock = std::chrono::steady_clock;
using Bytes = nb::ndarray<nb::c_contig, nb::device::cpu>;

constexpr int kTimedRuns = 5;
constexpr double kTimedSeconds = 0.004;  // of one timed submission: launches repeat in it, so that what a submission costs is shared
constexpr int kMostLaunches = 32;

struct NativeDevice {
  DevicePtr device;
  DevicePtr get() const {
    if (!device) throw InvalidArgument("the device is closed");
    return device;
  }
};

// The size of each kernel's argument struct: devices read that much of what a dispatch carries.
size_t args_bytes(const std::string& kernel) {
  static const std::vector<std::pair<size_t, std::vector<const char*>>> sizes = {
      {sizeof(LilyEmbedArgs), {"embed_step", "embed_rows"}},
      {sizeof(LilyNormArgs), {"rmsnorm_rows", "norm_final", "residual_rows", "residual_norm_rows", "residual_step", "take_rows"}},
      {sizeof(LilyGemvArgs), {"gemv", "gemv_norm", "gemv_residual"}},
      {sizeof(LilyGateUpArgs), {"gate_up_norm"}},
      {sizeof(LilyMoeArgs), {"moe_gate_up", "moe_down", "moe_gemv"}},
      {sizeof(LilyRouteArgs), {"moe_histogram", "moe_scan", "moe_scatter"}},
      {sizeof(LilyMoeRowsArgs), {"moe_topk_rows", "moe_group", "moe_gemm_rows", "moe_gate_up_rows", "moe_combine_rows"}},
      {sizeof(LilyGemmArgs), {"gemm", "gemm_residual", "gate_up_rows", "expand_rows", "swiglu_rows"}},
      {sizeof(LilyGdnArgs), {"gdn_step", "conv_rows", "gdn_prepare_rows", "gdn_scan", "gated_norm_rows"}},
      {sizeof(LilyAttnArgs),
       {"attn_prepare", "attn_split", "attn_split_long", "attn_combine", "attn_prepare_rows", "attn_rows", "head_norm_rows", "rope_rows", "kv_write_rows", "gate_rows"}},
      {sizeof(LilySampleArgs), {"sample_adjust", "sample_mass", "sample_draw", "score_rows"}},
  };
  for (const auto& [bytes, kernels] : sizes)
    for (const char* name : kernels)
      if (kernel == name) return bytes;
  throw InvalidArgument("no kernel is named '" + kernel + "'");
}

[[noreturn]] void refuse(const Dispatch& d, const std::string& why) { throw InvalidArgument(d.kernel + ": " + why); }

// A use is None, or (buffer, "r" | "w" | "b").
BufferUse use_from(const Dispatch& d, nb::handle h, const std::vector<uint64_t>& sizes) {
  if (h.is_none()) return {};
  auto [index, access] = nb::cast<std::pair<int64_t, std::string>>(h);
  if (index < 0 || size_t(index) >= sizes.size()) refuse(d, "uses buffer " + std::to_string(index) + " of " + std::to_string(sizes.size()));
  if (access != "r" && access != "w" && access != "b") refuse(d, "access is '" + access + "', expected r, w or b");
  return {Symbol(index), 0, sizes[size_t(index)], access == "r" ? Access::read : access == "w" ? Access::write : Access::read_write};
}

Dispatch dispatch_from(nb::dict from, const std::vector<uint64_t>& sizes) {
  Dispatch d;
  d.kernel = d.label = nb::cast<std::string>(from["kernel"]);
  const nb::bytes args = nb::cast<nb::bytes>(from["args"]);
  const size_t expected = args_bytes(d.kernel);
  if (args.size() != expected) refuse(d, std::to_string(args.size()) + " bytes of arguments, expected " + std::to_string(expected));
  d.args.assign(args.c_str(), args.c_str() + args.size());
  d.groups = nb::cast<uint32_t>(from["groups"]);
  d.rows = nb::cast<uint32_t>(from["rows"]);
  d.indirect = nb::cast<int>(from["indirect"]);
  for (nb::handle h : nb::cast<nb::list>(from["uses"])) d.uses.push_back(use_from(d, h, sizes));
  if (d.uses.empty()) refuse(d, "no buffers");
  if (d.indirect < -1 || d.indirect >= int(d.uses.size())) refuse(d, "its grid is buffer " + std::to_string(d.indirect) + " of " + std::to_string(d.uses.size()));
  if (d.indirect >= 0 && d.uses[size_t(d.indirect)].bytes < 12) refuse(d, "its grid needs 12 bytes, found " + std::to_string(d.uses[size_t(d.indirect)].bytes));
  return d;
}

// Dispatches with the buffers they run on; each is a stage of its own.
struct Job {
  DevicePtr device;
  std::vector<Dispatch> dispatches;
  std::vector<Bytes> initial;
  std::vector<bool> written;
  BindingSet bindings;
  std::chrono::milliseconds timeout{};
  Interrupt interrupted;

  void allocate() {
    bindings.fixed = std::make_shared<Bindings>();
    for (const Bytes& from : initial) bindings.dynamic.push_back({device->allocate(from.nbytes()), 0});
    fill(false);
  }
  void fill(bool only_written) {
    for (size_t i = 0; i < initial.size(); i++)
      if (!only_written || written[i]) std::memcpy(bindings.dynamic[i].buffer->host(), initial[i].data(), initial[i].nbytes());
  }

  PreparedPtr prepare(int times) const {
    std::vector<Dispatch> all;
    Stages stages;
    for (int n = 0; n < times; n++)
      for (const Dispatch& d : dispatches) {
        stages.push_back({uint32_t(all.size())});
        all.push_back(d);
      }
    return device->prepare(std::move(all), std::move(stages));
  }

  // Seconds from the submission to its end. A device that does not answer in time is an error, not a wait without end.
  double run(const PreparedPtr& program) const {
    for (int ms = 0; device->in_flight(); ms++) {  // a ticket may be done a moment before its submission counts as ended
      if (ms == 1000) throw GPUError(-1, "the device has not ended what it was given before");
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    auto cancel = std::make_shared<std::atomic<bool>>(false);
    Submission s;
    s.program = program;
    s.bindings = bindings;
    s.cancel = cancel;
    const auto begin = Clock::now();
    TicketPtr ticket = device->submit(std::move(s));
    while (!ticket->wait_for(std::chrono::milliseconds(50))) {
      if (Clock::now() - begin > timeout) {
        cancel->store(true);
        throw GPUError(-1, dispatches[0].kernel + ": no answer within " + std::to_string(timeout.count()) + " ms");
      }
      if (interrupted()) {
        cancel->store(true);
        throw Interrupted();
      }
    }
    const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
    ticket->check();
    return seconds;
  }

  std::vector<std::vector<uint8_t>> results() const {
    std::vector<std::vector<uint8_t>> found(initial.size());
    for (size_t i = 0; i < initial.size(); i++) {
      const uint8_t* data = bindings.dynamic[i].buffer->host();
      if (written[i]) found[i].assign(data, data + initial[i].nbytes());
    }
    return found;
  }

  // Median seconds of the dispatches over several submissions in which they repeat.
  double time(double first) {
    const int launches = std::clamp(int(kTimedSeconds / std::max(first, 1e-6)), 1, kMostLaunches);
    const PreparedPtr program = prepare(launches);
    std::vector<double> seconds;
    for (int i = 0; i < kTimedRuns; i++) {
      fill(true);
      seconds.push_back(run(program) / launches);
    }
    std::nth_element(seconds.begin(), seconds.begin() + kTimedRuns / 2, seconds.end());
    return seconds[kTimedRuns / 2];
  }
};

nb::dict run(NativeDevice& handle, nb::list dispatches, nb::list buffers, bool again, bool timed, double timeout_seconds) {
  Job job;
  job.device = handle.get();
  if (!(timeout_seconds > 0 && timeout_seconds < 1e6)) throw InvalidArgument("timeout_seconds must be positive");
  job.timeout = std::chrono::milliseconds(int64_t(timeout_seconds * 1000));
  std::vector<uint64_t> sizes;
  for (nb::handle h : buffers) {
    job.initial.push_back(nb::cast<Bytes>(h));
    sizes.push_back(job.initial.back().nbytes());
  }
  try {
    for (nb::handle h : dispatches) job.dispatches.push_back(dispatch_from(nb::cast<nb::dict>(h), sizes));
  } catch (const nb::cast_error&) {
    throw InvalidArgument("a dispatch is {kernel: str, args: bytes, uses: [None or (int, str)], groups: int, rows: int, indirect: int}; one holds another type");
  }
  if (job.dispatches.empty()) throw InvalidArgument("no dispatches");
  job.written.resize(sizes.size());
  for (const Dispatch& d : job.dispatches)
    for (const BufferUse& use : d.uses)
      if (use.symbol != kNoSymbol && use.access != Access::read) job.written[use.symbol] = true;

  std::vector<std::vector<uint8_t>> found;
  double prepare_seconds = 0, first = 0, median = 0;
  bool repeats = true;
  Signals signals;
  job.interrupted = signals.poll();
  signals.run([&] {
    job.allocate();
    const auto begin = Clock::now();
    const PreparedPtr program = job.prepare(1);
    prepare_seconds = std::chrono::duration<double>(Clock::now() - begin).count();
    first = job.run(program);
    found = job.results();
    if (again) {
      job.fill(true);
      first = std::min(first, job.run(program));
      repeats = job.results() == found;
    }
    if (timed) median = job.time(first);
  });

  nb::list outputs;
  for (size_t i = 0; i < found.size(); i++) outputs.append(job.written[i] ? copy_array<uint8_t>(found[i].data(), found[i].size()) : nb::none());
  nb::dict result;
  result["buffers"] = outputs;
  result["prepare_seconds"] = prepare_seconds;
  result["repeats"] = repeats;
  result["seconds"] = timed ? nb::cast(median) : nb::none();
  return result;
}

nb::dict launch_variants_dict() {
  nb::dict found;
  for (const auto* list : {&decode_launches(), &prefill_launches(), &prefill_small_launches()})
    for (const LaunchEntry& e : *list) {
      nb::list names;
      for (const char* v : e.variants) names.append(nb::str(v));
      found[nb::str(e.kernel)] = names;
    }
  return found;
}

}  // namespace

void define_selftest(nb::module_& m) {
  nb::module_ t = m.def_submodule("selftest", "Single dispatches on any device, for `lily selftest`; not a stable interface.");
  nb::class_<NativeDevice>(t, "Device", "An open device.")
      .def(
          "__init__",
          [](NativeDevice* self, const std::string& name) {
            nb::gil_scoped_release release;
            new (self) NativeDevice{open_device(name)};
          },
          "name"_a)
      .def_prop_ro("info", [](NativeDevice& d) { return device_dict(d.get()->info()); })
      .def_prop_ro(
          "tile_map", [](NativeDevice& d) { return d.get()->traits().tile_map; }, "Whether it takes GPU forms of dispatches.")
      .def_prop_ro("in_flight", [](NativeDevice& d) { return d.get()->in_flight(); })
      .def(
          "fail_at", [](NativeDevice& d, int step, int stage) { d.get()->fail_at(step, stage); }, "step"_a, "stage"_a)
      .def("run", &run, "dispatches"_a, "buffers"_a, "again"_a = false, "timed"_a = false, "timeout_seconds"_a = 60.0,
           "Runs dispatches one after the other on copies of `buffers`. `uses` of a dispatch are None or (buffer, r|w|b). Returns `buffers` (bytes of what was written, "
           "else None), `prepare_seconds`, `repeats` (with `again`: a second run gave the same bits) and `seconds` (with `timed`: the median).")
      .def(
          "abandon", [](NativeDevice& d) { new DevicePtr(std::move(d.device)); }, "Lets go of a device that gives no answer, and never waits for it.")
      .def("close", [](NativeDevice& d) {
        DevicePtr gone = std::move(d.device);
        nb::gil_scoped_release release;
        gone.reset();
      });
  t.def("variants", &launch_variants_dict, "Every kernel with a Metal form, and the variants of it that LILY_KERNEL may force.");
}

}  // namespace lily::bind
