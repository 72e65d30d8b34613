#include "bind/limits.hpp"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bind/convert.hpp"
#include "bind/types.hpp"
#include "device/cpu/limits.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace lily::bind {

void define_limits(nb::module_& m) {
  m.def("limit_kinds", [] { return limit_kinds(); }, "What measure_limit can measure on this machine's CPU.");
  m.def(
      "measure_limit",
      [](const std::string& kind, uint64_t bytes, int threads, int windows, double seconds) {
        std::vector<std::pair<double, double>> rates;
        nb::gil_scoped_release release;
        for (const LimitWindow& w : measure_limit({kind, bytes, threads, windows, seconds})) rates.emplace_back(w.wall, w.running);
        return rates;
      },
      "kind"_a, "bytes"_a = 0, "threads"_a = 1, "windows"_a = 5, "seconds"_a = 0.1,
      "Rates of the CPU for each window, by the clock and by the threads' own time: bytes, codes or operations a second.");
}

void define_clock(nb::module_& m) {
  m.def("start_clock", [](NativeModel& model) { model.get()->start_clock(); }, "model"_a, "From now on the time of each stage is kept.");
  m.def(
      "stop_clock",
      [](NativeModel& model) {
        nb::list list;
        for (const TimedProgram& timed : model.get()->stop_clock()) {
          nb::dict item;
          item["kind"] = timed.kind;
          item["rows"] = timed.rows;
          item["dispatches"] = dispatch_list(timed.program, timed.stages);
          std::vector<double> flat;
          for (const auto& run : timed.seconds) flat.insert(flat.end(), run.begin(), run.end());
          item["seconds"] = copy_array<double>(flat.data(), flat.size());  // [runs * stages]
          list.append(item);
        }
        return list;
      },
      "model"_a, "Programs that ran since start_clock, with the seconds of each stage of each run.");
}

}  // namespace lily::bind
