// A fibre is a stack and a saved stack pointer; switching between two takes a handful of instructions.
#pragma once
#include <cstddef>
#include <cstdint>

#if !defined(__x86_64__) && !defined(__aarch64__) && !defined(LILY_SIM_UCONTEXT)
#define LILY_SIM_UCONTEXT 1
#endif
#ifdef LILY_SIM_UCONTEXT
#include <ucontext.h>
#endif

namespace lily_sim {

#ifdef LILY_SIM_UCONTEXT
struct Context {
  ucontext_t state;
};
inline void switch_context(Context* from, Context* to) { swapcontext(&from->state, &to->state); }
#else
struct Context {
  void* stack_pointer = nullptr;
};
extern "C" void lily_sim_switch(void** save, void* to);
inline void switch_context(Context* from, Context* to) { lily_sim_switch(&from->stack_pointer, to->stack_pointer); }
#endif

// Prepares `context` so that the next switch to it calls `entry`, which never returns, on the stack [low, high).
void prepare_context(Context* context, char* low, char* high, void (*entry)());

// Stacks for up to 1024 fibres, staggered so that equal depths do not share a cache set.
class Stacks {
 public:
  static constexpr size_t kBytes = 128 << 10;
  static constexpr size_t kStagger = 320;
  static constexpr unsigned kCount = 1024;
  Stacks();
  ~Stacks();
  Stacks(const Stacks&) = delete;
  Stacks& operator=(const Stacks&) = delete;
  char* low(unsigned i) const { return memory_ + i * (kBytes + kStagger); }
  char* high(unsigned i) const { return low(i) + kBytes; }
  // The lowest bytes of a stack hold a mark; a fibre that ran out of stack has overwritten it.
  void mark(unsigned i) const;
  bool overflowed(unsigned i) const;

 private:
  char* memory_;
  size_t bytes_;
};

}  // namespace lily_sim
