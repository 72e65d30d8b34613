// The Mac does not fall asleep by itself while there is work: a client would time out in the middle of a long prompt.
#pragma once
#include "device/metal/messages.hpp"

namespace lily::metal {

class Awake {
 public:
  Awake(const Messages& messages, bool wanted) : m_(messages), wanted_(wanted) {}
  ~Awake() { end(); }
  Awake(const Awake&) = delete;

  bool held() const { return bool(activity_); }
  void begin() {
    if (!wanted_ || held()) return;
    Pool pool(m_);
    Object activity = m_.begin_activity(process(), kIdleSleepDisabled, string_of(m_, "Lily generates text"));
    if (activity) activity_ = Owned(m_, m_.retain(activity));
  }
  void end() {
    if (!held()) return;
    Pool pool(m_);
    m_.end_activity(process(), activity_.get());
    activity_ = Owned();
  }

 private:
  static constexpr uint64_t kIdleSleepDisabled = 1ull << 20;  // NSActivityIdleSystemSleepDisabled
  Object process() const { return m_.process_info(m_.class_named("NSProcessInfo")); }
  const Messages& m_;
  bool wanted_;
  Owned activity_;
};

}  // namespace lily::metal
