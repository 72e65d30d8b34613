#pragma once
#include <nanobind/nanobind.h>

namespace lily::bind {

void define_session_io(nanobind::module_& m);

}  // namespace lily::bind
