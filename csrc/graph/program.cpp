#include "graph/program.hpp"

#include <algorithm>
#include <unordered_map>

#include "base/error.hpp"

namespace lily {

Schedule Schedule::parse(const std::string& text) {
  auto number = [&](const std::string& s) -> uint64_t {
    if (s.empty() || s.size() > 18 || s.find_first_not_of("0123456789") != std::string::npos)
      throw InvalidArgument("schedule '" + text + "': expected stages, stages:drop:N, serial, shuffle:SEED or shuffle:SEED:drop:N");
    return std::stoull(s);
  };
  Schedule schedule;
  if (text == "stages" || text.empty()) return schedule;
  if (text.rfind("stages:drop:", 0) == 0) {
    schedule.drop_barrier = int(number(text.substr(12)));
    return schedule;
  }
  if (text == "serial") {
    schedule.kind = Kind::serial;
    return schedule;
  }
  if (text.rfind("shuffle:", 0) != 0) number("");
  schedule.kind = Kind::shuffle;
  std::string rest = text.substr(8);
  size_t drop = rest.find(":drop:");
  if (drop != std::string::npos) {
    schedule.drop_barrier = int(number(rest.substr(drop + 6)));
    rest = rest.substr(0, drop);
  }
  schedule.seed = number(rest);
  return schedule;
}

Slot Program::workspace(const std::string& name, uint64_t bytes) {
  auto found = slots_.find(name);
  if (found != slots_.end()) {
    if (found->second.bytes != bytes) throw Error("workspace slot " + name + " was asked for with two sizes");
    return found->second;
  }
  Slot slot{workspace_, workspace_bytes_, bytes};
  workspace_bytes_ += (bytes + 63) / 64 * 64;
  slots_[name] = slot;
  return slot;
}

Stages Program::stages() const {
  // Per symbol, the ranges touched so far with the stage that touched them last.
  struct Touch {
    uint64_t begin, end;
    uint32_t stage;
    bool write;
  };
  std::unordered_map<Symbol, std::vector<Touch>> touched;
  Stages stages;
  for (uint32_t i = 0; i < dispatches_.size(); i++) {
    uint32_t stage = 0;
    for (const BufferUse& use : dispatches_[i].uses) {
      if (use.symbol == kNoSymbol) continue;
      bool write = use.access != Access::read;
      for (const Touch& t : touched[use.symbol])
        if ((write || t.write) && use.offset < t.end && t.begin < use.offset + use.bytes) stage = std::max(stage, t.stage + 1);
    }
    for (const BufferUse& use : dispatches_[i].uses) {
      if (use.symbol == kNoSymbol) continue;
      bool write = use.access != Access::read;
      uint64_t begin = use.offset, end = use.offset + use.bytes;
      auto& list = touched[use.symbol];
      // A write covers what it overwrites entirely: anything later that meets those bytes meets this write too, at a later stage.
      if (write) list.erase(std::remove_if(list.begin(), list.end(), [&](const Touch& t) { return begin <= t.begin && t.end <= end && t.stage < stage; }), list.end());
      bool known = false;
      for (Touch& t : list)
        if (t.begin == begin && t.end == end && t.write == write) {
          t.stage = std::max(t.stage, stage);
          known = true;
        }
      if (!known) list.push_back({begin, end, stage, write});
    }
    if (stages.size() <= stage) stages.resize(stage + 1);
    stages[stage].push_back(i);
  }
  return stages;
}

std::vector<std::vector<uint32_t>> Program::waits_for(const Stages& stages) const {
  auto meet = [](const BufferUse& a, const BufferUse& b) {
    return a.symbol != kNoSymbol && a.symbol == b.symbol && (a.access != Access::read || b.access != Access::read) && a.offset < b.offset + b.bytes && b.offset < a.offset + a.bytes;
  };
  std::vector<std::vector<uint32_t>> found(dispatches_.size());
  for (size_t s = 1; s < stages.size(); s++)
    for (uint32_t i : stages[s])
      for (uint32_t j : stages[s - 1]) {
        bool waits = false;
        for (const BufferUse& a : dispatches_[i].uses)
          for (const BufferUse& b : dispatches_[j].uses) waits = waits || meet(a, b);
        if (waits) found[i].push_back(j);
      }
  return found;
}

Stages Program::order(const Schedule& schedule) const {
  Stages planned = stages(), one_by_one;
  if (schedule.drop_barrier >= 0 && size_t(schedule.drop_barrier) + 1 < planned.size()) {
    auto next = planned.begin() + schedule.drop_barrier + 1;
    planned[schedule.drop_barrier].insert(planned[schedule.drop_barrier].end(), next->begin(), next->end());
    planned.erase(next);
  }
  if (schedule.kind == Schedule::Kind::stages) return planned;
  if (schedule.kind == Schedule::Kind::serial) {
    for (uint32_t i = 0; i < dispatches_.size(); i++) one_by_one.push_back({i});
    return one_by_one;
  }
  uint64_t state = schedule.seed * 0x9e3779b97f4a7c15ull + 0x632be59bd9b4e019ull;
  auto draw = [&](uint64_t n) {  // xorshift64*; an even spread matters little here
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return (state * 0x2545f4914f6cdd1dull >> 33) % n;
  };
  for (auto& stage : planned) {
    for (size_t i = stage.size(); i > 1; i--) std::swap(stage[i - 1], stage[draw(i)]);
    for (uint32_t d : stage) one_by_one.push_back({d});
  }
  return one_by_one;
}

}  // namespace lily
