// Dispatches on any device, for `lily selftest`.
#pragma once
#include <nanobind/nanobind.h>

namespace lily::bind {

void define_selftest(nanobind::module_& m);

}  // namespace lily::bind
