// A thread with a stack of known size: kernels keep tiles on the stack, and some systems give threads as little as 128 KiB.
#pragma once
#include <functional>
#include <pthread.h>

#include "base/error.hpp"

namespace lily {

class Thread {
 public:
  static constexpr size_t kStackBytes = 8u << 20;

  Thread() = default;
  explicit Thread(std::function<void()> fn) {
    auto* body = new std::function<void()>(std::move(fn));
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, kStackBytes);
    int failed = pthread_create(&handle_, &attributes, run, body);
    pthread_attr_destroy(&attributes);
    if (failed) {
      delete body;
      throw DeviceError("a thread could not be started (error " + std::to_string(failed) + "); set LILY_THREADS to a smaller number");
    }
  }
  void join() { pthread_join(handle_, nullptr); }

 private:
  static void* run(void* p) {
    auto* body = static_cast<std::function<void()>*>(p);
    (*body)();
    delete body;
    return nullptr;
  }
  pthread_t handle_{};
};

}  // namespace lily
