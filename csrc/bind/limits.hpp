// The machine's measured limits, and the times of stages.
#pragma once
#include <nanobind/nanobind.h>

namespace lily::bind {

void define_limits(nanobind::module_& m);
void define_clock(nanobind::module_& m);

}  // namespace lily::bind
