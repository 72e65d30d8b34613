// The table of messages on macOS: typed objc_msgSend, no Apple SDK. Metal itself is opened at run time, so that the import works on any Mac.
#if defined(__APPLE__)
#include <dlfcn.h>
#include <objc/message.h>
#include <objc/runtime.h>
#include <sys/sysctl.h>
#include <time.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "device/metal/messages.hpp"

extern "C" {
// Part of the Objective-C runtime's stable interface, in libobjc; <objc/objc-internal.h> is not public.
void* objc_autoreleasePoolPush(void);
void objc_autoreleasePoolPop(void* pool);
}

namespace lily::metal {
namespace {

enum MessageIndex {
#define LILY_MESSAGE(Class, name, selector, Return, parameters) k_##name,
#define LILY_CLASS_MESSAGE LILY_MESSAGE
#include "device/metal/messages.inc"
#undef LILY_MESSAGE
#undef LILY_CLASS_MESSAGE
  kMessageCount
};

SEL selectors[kMessageCount];

template <int I, class R, class... A>
R send(Object self, A... a) {
  return reinterpret_cast<R (*)(Object, SEL, A...)>(objc_msgSend)(self, selectors[I], a...);
}

template <int I, class R, class... A>
void bind(R (*&entry)(Object, A...)) {
  entry = &send<I, R, A...>;
}

// From the kernel's version: the system's own is told differently to programs that were built for an older one. Darwin 25.2 is macOS 26.2, 24.5 is 15.5.
uint32_t os_version() {
  char text[64] = "";
  size_t bytes = sizeof(text) - 1;
  unsigned major = 0, minor = 0;
  if (sysctlbyname("kern.osrelease", text, &bytes, nullptr, 0) == 0) std::sscanf(text, "%u.%u", &major, &minor);
  if (major < 20) return 0;
  return (major >= 25 ? major + 1 : major - 9) * 100 + minor;
}

double awake_seconds() { return double(clock_gettime_nsec_np(CLOCK_UPTIME_RAW)) * 1e-9; }

Object (*default_device)();
Object (*all_devices)();

Object system_default_device() {
  if (Object device = default_device()) return device;
  Object array = all_devices ? all_devices() : nullptr;
  if (!array) return nullptr;
  // An NSArray is a CFArray.
  auto count = reinterpret_cast<long (*)(Object)>(dlsym(RTLD_DEFAULT, "CFArrayGetCount"));
  auto value = reinterpret_cast<Object (*)(Object, long)>(dlsym(RTLD_DEFAULT, "CFArrayGetValueAtIndex"));
  Object device = count && value && count(array) > 0 ? value(array, 0) : nullptr;
  if (device) send<k_retain, Object>(device);
  send<k_release, void>(array);
  return device;
}

void on_completed(Object command_buffer, CompletedFn fn, void* context) {
  void (^block)(Object) = ^(Object buffer) { fn(context, buffer); };
  // The message copies the block: this one, on the stack, need not outlive the call.
  send<k_add_completed_handler, void>(command_buffer, (Object)block);
}

}  // namespace

const Messages* messages(std::string* reason) {
  static std::string missing;
  static const Messages* found = []() -> const Messages* {
    // Foundation first: it defines NSString and its like.
    for (const char* name : {"Foundation", "Metal"}) {
      const std::string path = std::string("/System/Library/Frameworks/") + name + ".framework/" + name;
      if (!dlopen(path.c_str(), RTLD_LAZY | RTLD_GLOBAL)) {
        missing = std::string("the framework ") + name + " cannot be opened: " + dlerror();
        return nullptr;
      }
    }
    static Messages m{};
    // Without it a program that has no window may be told that there is no GPU.
    dlopen("/System/Library/Frameworks/CoreGraphics.framework/CoreGraphics", RTLD_LAZY | RTLD_GLOBAL);
    default_device = reinterpret_cast<Object (*)()>(dlsym(RTLD_DEFAULT, "MTLCreateSystemDefaultDevice"));
    all_devices = reinterpret_cast<Object (*)()>(dlsym(RTLD_DEFAULT, "MTLCopyAllDevices"));
    if (!default_device) {
      missing = "Metal.framework has no MTLCreateSystemDefaultDevice";
      return nullptr;
    }
#define LILY_MESSAGE(Class, name, selector, Return, parameters) \
  selectors[k_##name] = sel_registerName(selector);             \
  bind<k_##name>(m.name);
#define LILY_CLASS_MESSAGE LILY_MESSAGE
#include "device/metal/messages.inc"
#undef LILY_MESSAGE
#undef LILY_CLASS_MESSAGE
    m.system_default_device = system_default_device;
    m.class_named = [](const char* name) -> Object { return (Object)objc_getClass(name); };
    m.responds = [](Object object, const char* selector) { return bool(class_respondsToSelector(object_getClass((id)object), sel_registerName(selector))); };
    m.push_pool = objc_autoreleasePoolPush;
    m.pop_pool = objc_autoreleasePoolPop;
    m.on_completed = on_completed;
    m.os_version = os_version;
    m.awake_seconds = awake_seconds;
    m.annotate = nullptr;
    return &m;
  }();
  if (!found && reason) *reason = missing;
  return found;
}

}  // namespace lily::metal
#endif
