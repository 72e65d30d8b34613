// Conversions between Python dicts and the engine's structs.
#pragma once
#include <nanobind/nanobind.h>

#include "engine/decoder.hpp"

namespace lily::bind {

ModelSpec spec_from(const nanobind::dict& d);
std::vector<WeightSource> weights_from(const nanobind::list& list);
SamplingParams sampling_from(const nanobind::dict& d);
nanobind::dict device_dict(const DeviceInfo& info);
nanobind::list dispatch_list(const Program& program, const Stages& stages, bool on_cpu = true);
nanobind::dict plan_dict(const Model& model, const Policy& policy, uint32_t chunk);

}  // namespace lily::bind
