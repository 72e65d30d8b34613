// What the GPU's threads and the device's thread tell each other: completions come from Metal's own threads and are only recorded.
#pragma once
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "device/metal/messages.hpp"

namespace lily::metal {

// How one command buffer ended.
struct Completion {
  uint64_t id = 0;
  bool ok = false, lost = false;  // lost: the GPU will run nothing more for this process
  std::string error;
  double seconds = 0;             // on the GPU
};

struct Timeline {
  explicit Timeline(const Messages& messages) : m(messages) {}
  const Messages& m;
  std::mutex mutex;
  std::condition_variable wake;  // of the device's thread
  std::deque<Completion> done;
  // What command buffers that were given up on may still write to, by their id: given back when they end after all.
  std::map<uint64_t, std::shared_ptr<const void>> kept;
};

// Commits the buffer; its completion is put into the timeline, which lives as long as anything in flight.
void commit(const std::shared_ptr<Timeline>& timeline, Object command_buffer, uint64_t id);

}  // namespace lily::metal
