#pragma once
#include "../metal_tensor"
#include "../matmul2d.hpp"
