// The thin layer between the Metal device and Apple's frameworks: a table of typed functions, one for each message in messages.inc.
// On macOS they are objc_msgSend. Elsewhere a stand-in for tests may fill the table: the library that LILY_SIM names.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

namespace lily::metal {

using Object = void*;
struct MtlSize {
  uint64_t width, height, depth;
};

// What a dispatch touches, for a stand-in that checks accesses: Metal itself has no such message.
struct Touched {
  const char* label;
  uint64_t bytes[20];     // of buffer i behind its offset; 0: not bound
  uint32_t writes;        // bit i: buffer i may be written
  uint32_t reads;
};

using CompletedFn = void (*)(void* context, Object command_buffer);

#define LILY_STRIP(...) __VA_OPT__(, ) __VA_ARGS__
struct Messages {
#define LILY_MESSAGE(Class, name, selector, Return, parameters) Return (*name)(Object self LILY_STRIP parameters);
#define LILY_CLASS_MESSAGE LILY_MESSAGE
#include "device/metal/messages.inc"
#undef LILY_MESSAGE
#undef LILY_CLASS_MESSAGE

  // What are functions, not messages.
  Object (*system_default_device)();                 // +1; null where there is no GPU
  Object (*class_named)(const char* name);           // null on systems that are older than the class
  bool (*responds)(Object object, const char* selector);
  void* (*push_pool)();
  void (*pop_pool)(void* pool);
  void (*on_completed)(Object command_buffer, CompletedFn fn, void* context);  // makes the block of addCompletedHandler:
  uint32_t (*os_version)();                          // 26.2 is 2602
  double (*awake_seconds)();                         // a clock that stands still while the machine sleeps
  void (*annotate)(Object encoder, const Touched& touched);  // null on macOS
};

constexpr uint32_t kMessagesVersion = 2;  // of this struct, between the extension and a stand-in

// Null with a reason where neither Metal nor a stand-in is there. Filled once.
const Messages* messages(std::string* reason = nullptr);

// Objects that are autoreleased in this scope go at its end.
class Pool {
 public:
  explicit Pool(const Messages& m) : m_(m), pool_(m.push_pool()) {}
  ~Pool() { m_.pop_pool(pool_); }
  Pool(const Pool&) = delete;

 private:
  const Messages& m_;
  void* pool_;
};

// An object that this handle owns: from "new", "alloc", or retained.
class Owned {
 public:
  Owned() = default;
  Owned(const Messages& m, Object object) : m_(&m), object_(object) {}
  Owned(Owned&& o) noexcept : m_(o.m_), object_(std::exchange(o.object_, nullptr)) {}
  Owned& operator=(Owned&& o) noexcept {
    std::swap(m_, o.m_);
    std::swap(object_, o.object_);
    return *this;
  }
  ~Owned() {
    if (object_) m_->release(object_);
  }
  Object get() const { return object_; }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  const Messages* m_ = nullptr;
  Object object_ = nullptr;
};

inline Object string_of(const Messages& m, const std::string& text) { return m.string(m.class_named("NSString"), text.c_str(), 4); }  // UTF-8; autoreleased
std::string text_of(const Messages& m, Object string);
// "description (domain code 8)" of an NSError, "no reason was given" of null.
std::string describe(const Messages& m, Object error);

}  // namespace lily::metal
