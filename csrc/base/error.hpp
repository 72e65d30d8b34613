// Typed errors. They are mapped to Python classes once, in bind/errors.cpp.
#pragma once
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

namespace lily {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct CheckpointError : Error {
  std::string found, expected, tensor;
  CheckpointError(const std::string& tensor, const std::string& found, const std::string& expected)
      : Error(tensor + ": found " + found + ", expected " + expected), found(found), expected(expected), tensor(tensor) {}
};

struct DeviceError : Error {
  using Error::Error;
};

// A submission failed on the device: at which stage of its program, and what the device said.
struct GPUError : DeviceError {
  int stage;
  std::string log;
  GPUError(int stage, const std::string& log)
      : DeviceError("the device failed at stage " + std::to_string(stage) + ": " + log), stage(stage), log(log) {}
};

struct OutOfMemoryError : Error {
  uint64_t needed, available;
  std::string hint;
  OutOfMemoryError(const std::string& what, uint64_t needed, uint64_t available, const std::string& hint)
      : Error(what + ": " + std::to_string(needed) + " bytes needed, " + std::to_string(available) + " available; " + hint),
        needed(needed), available(available), hint(hint) {}
};

struct ContextOverflowError : Error {
  uint64_t tokens, limit;
  ContextOverflowError(uint64_t tokens, uint64_t limit)
      : Error(std::to_string(tokens) + " tokens do not fit in a context of " + std::to_string(limit) +
              "; shorten the prompt or load the model with a larger max_context"),
        tokens(tokens), limit(limit) {}
};

struct SamplingError : Error {
  using Error::Error;
};

struct CancelledError : Error {
  using Error::Error;
};

// Becomes ValueError.
struct InvalidArgument : Error {
  using Error::Error;
};

}  // namespace lily
