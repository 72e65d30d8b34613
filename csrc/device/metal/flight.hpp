// One submission on its way through the GPU, cut into command buffers.
#pragma once
#include "device/metal/encoder.hpp"

namespace lily::metal {

struct Flight {
  Submission submission;
  TicketPtr ticket;
  std::shared_ptr<const MetalProgram> program;
  Stages single;              // each dispatch by itself, when somebody looks at them one by one
  StageTimes clock;
  int fail_stage = -1;        // a fault that a test injected
  size_t next = 0;            // the first stage that is not encoded
  int outstanding = 0;        // command buffers on the GPU
  bool ended = false;         // nothing more is encoded
  Ticket::Status result = Ticket::Status::done;
  int stage = -1;
  std::string log;
  std::vector<double> seconds;  // per stage, when there is a clock

  const Stages& stages() const { return single.empty() ? program->stages : single; }
  bool one_by_one() const { return clock || submission.observe; }
  void end(Ticket::Status status, int at, std::string why = "") {
    if (!ended || result == Ticket::Status::done) {
      result = status;
      stage = at;
      log = std::move(why);
    }
    ended = true;
  }
};
using FlightPtr = std::shared_ptr<Flight>;

// Corrects the estimates by what was measured, up at once and down slowly, so that a command buffer stays short on any GPU.
class Pace {
 public:
  explicit Pace(double slice) : slice_(slice) {}
  void learn(double estimated, double measured);
  double scale() const { return scale_; }
  // The end of the command buffer that begins at stage `begin`: as many stages as fit the slice, at least one.
  size_t cut(const MetalProgram& program, size_t begin) const;

 private:
  double slice_, scale_ = 1;
};

}  // namespace lily::metal
