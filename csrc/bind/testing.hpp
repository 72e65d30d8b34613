// Test hooks: faults, schedules, traces, states, single kernels.
#pragma once
#include <nanobind/nanobind.h>

namespace lily::bind {

void define_testing(nanobind::module_& m);

}  // namespace lily::bind
