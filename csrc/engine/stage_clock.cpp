#include "engine/stage_clock.hpp"

#include "engine/engine.hpp"

namespace lily {

void Engine::start_clock() {
  drain();
  std::lock_guard lock(mutex_);
  clock_ = std::make_shared<StageClock>();
  device_->set_clock([clock = clock_](const PreparedPtr& program, const std::vector<double>& seconds) { clock->add(program, seconds); });
}

std::vector<TimedProgram> Engine::stop_clock() {
  drain();
  std::lock_guard lock(mutex_);
  if (!clock_) throw InvalidArgument("no clock is running: start_clock first");
  device_->set_clock(nullptr);
  auto runs = clock_->take();
  clock_.reset();
  static constexpr const char* kKinds[] = {"decode", "sampler", "prefill", "head_rows", "head_step"};
  std::vector<TimedProgram> timed;
  for (const auto& [key, ready] : programs_) {
    auto found = runs.find(ready.program);
    if (found == runs.end()) continue;
    Program program = record(key, policy_);
    Stages order = program.order(schedule_);
    timed.push_back({kKinds[key.kind], key.rows, std::move(program), std::move(order), std::move(found->second)});
  }
  return timed;
}

}  // namespace lily
