// A recorded list of dispatches over symbolic buffers, and the stages that its byte ranges allow.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "device/device.hpp"

namespace lily {

// Names for the buffers that programs refer to; one table for all programs of a model.
class Symbols {
 public:
  Symbol add(const std::string& name) {
    names_.push_back(name);
    return Symbol(names_.size() - 1);
  }
  size_t size() const { return names_.size(); }
  const std::string& name(Symbol s) const { return names_[s]; }

 private:
  std::vector<std::string> names_;
};

// A named place in the workspace of one program.
struct Slot {
  Symbol symbol = kNoSymbol;
  uint64_t offset = 0, bytes = 0;
  BufferUse read() const { return {symbol, offset, bytes, Access::read}; }
  BufferUse write() const { return {symbol, offset, bytes, Access::write}; }
  BufferUse update() const { return {symbol, offset, bytes, Access::read_write}; }
  Slot part(uint64_t at, uint64_t n) const { return {symbol, offset + at, n}; }
};

// How the stages are executed: as planned, one dispatch at a time in recorded order, or each stage's dispatches one at a time in an order drawn from a seed.
// drop_barrier merges that stage with the next before that: a test's way of showing that the barrier was needed.
struct Schedule {
  enum class Kind { stages, serial, shuffle } kind = Kind::stages;
  uint64_t seed = 0;
  int drop_barrier = -1;
  static Schedule parse(const std::string& text);  // "stages", "stages:drop:N", "serial", "shuffle:SEED", "shuffle:SEED:drop:N"; InvalidArgument
};

class Program {
 public:
  explicit Program(Symbol workspace, uint32_t rows = 1) : workspace_(workspace), rows_(rows) {}

  // A workspace slot; the same name gives the same slot again (its size must agree). Slots start at 64-byte boundaries.
  Slot workspace(const std::string& name, uint64_t bytes);
  void record(Dispatch dispatch) {
    dispatch.rows = rows_;
    dispatches_.push_back(std::move(dispatch));
  }

  Dispatch& last() { return dispatches_.back(); }
  const std::vector<Dispatch>& dispatches() const { return dispatches_; }
  uint64_t workspace_bytes() const { return workspace_bytes_; }

  // Stage of a dispatch = 1 + the latest stage of an earlier dispatch that touches an overlapping range, when one of the two writes it.
  Stages stages() const;
  Stages order(const Schedule& schedule) const;
  // Of each dispatch, those of the stage before its own that it must wait for.
  std::vector<std::vector<uint32_t>> waits_for(const Stages& stages) const;

 private:
  Symbol workspace_;
  uint32_t rows_;  // row bucket
  uint64_t workspace_bytes_ = 0;
  std::map<std::string, Slot> slots_;
  std::vector<Dispatch> dispatches_;
};

}  // namespace lily
