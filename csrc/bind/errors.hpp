// C++ errors to Python classes, in one place.
#pragma once
#include <nanobind/nanobind.h>

namespace lily::bind {

void define_errors(nanobind::module_& m);

}  // namespace lily::bind
