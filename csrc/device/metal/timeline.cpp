#include "device/metal/timeline.hpp"

namespace lily::metal {
namespace {

constexpr uint64_t kCompleted = 4;  // MTLCommandBufferStatus
struct Handler {
  std::shared_ptr<Timeline> timeline;
  uint64_t id;
};

// MTLCommandBufferError, in words a user can act on.
const char* meaning(int64_t code) {
  switch (code) {
    case 1: return "an internal error of the driver";
    case 2: return "it ran too long and macOS stopped it";
    case 3: return "the GPU read or wrote memory that is not there";
    case 4: return "this process has lost access to the GPU after earlier errors; restart it";
    case 7: return "this process may not use the GPU now";
    case 8: return "the GPU's memory is full; close other programs or lower memory_limit";
    case 9: return "a buffer was given back while the GPU used it";
    case 11: return "the GPU is gone";
    default: return "an error that Metal does not explain";
  }
}

bool fatal(int64_t code) { return code == 4 || code == 11; }

void completed(void* context, Object buffer) noexcept {
  std::unique_ptr<Handler> handler(static_cast<Handler*>(context));
  Timeline& t = *handler->timeline;
  Completion c;
  c.id = handler->id;
  try {
    Pool pool(t.m);
    c.ok = t.m.status(buffer) == kCompleted;
    if (c.ok) {
      c.seconds = t.m.gpu_end(buffer) - t.m.gpu_start(buffer);
    } else {
      Object error = t.m.error(buffer);
      const int64_t code = error ? t.m.error_code(error) : 0;
      c.lost = error && fatal(code);
      c.error = std::string(meaning(code)) + ": " + describe(t.m, error);
    }
  } catch (...) {  // no memory for the words
  }
  std::shared_ptr<const void> kept;
  {
    std::lock_guard<std::mutex> lock(t.mutex);
    if (auto found = t.kept.find(c.id); found != t.kept.end()) {
      kept = std::move(found->second);
      t.kept.erase(found);
    }
    t.done.push_back(std::move(c));
  }
  t.wake.notify_all();
}

}  // namespace

void commit(const std::shared_ptr<Timeline>& timeline, Object command_buffer, uint64_t id) {
  timeline->m.on_completed(command_buffer, completed, new Handler{timeline, id});
  timeline->m.commit(command_buffer);
}

}  // namespace lily::metal
