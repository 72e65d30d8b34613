#include "fiber.hpp"

#include <sys/mman.h>

#include <cstring>
#include <new>

#if defined(__APPLE__)
#define LILY_SYMBOL(name) "_" #name
#define LILY_HIDDEN(name) ".private_extern " LILY_SYMBOL(name) "\n"
#else
#define LILY_SYMBOL(name) #name
#define LILY_HIDDEN(name) ".hidden " LILY_SYMBOL(name) "\n"
#endif

#if defined(LILY_SIM_UCONTEXT)
#elif defined(__x86_64__)
asm(".text\n.globl " LILY_SYMBOL(lily_sim_switch) "\n" LILY_HIDDEN(lily_sim_switch) LILY_SYMBOL(lily_sim_switch) ":\n"
    "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
    "  movq %rsp, (%rdi)\n  movq %rsi, %rsp\n"
    "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n  ret\n");
#elif defined(__aarch64__)
asm(".text\n.globl " LILY_SYMBOL(lily_sim_switch) "\n" LILY_HIDDEN(lily_sim_switch) ".p2align 2\n" LILY_SYMBOL(lily_sim_switch) ":\n"
    "  sub sp, sp, #160\n"
    "  stp x19, x20, [sp]\n  stp x21, x22, [sp, #16]\n  stp x23, x24, [sp, #32]\n  stp x25, x26, [sp, #48]\n"
    "  stp x27, x28, [sp, #64]\n  stp x29, x30, [sp, #80]\n"
    "  stp d8, d9, [sp, #96]\n  stp d10, d11, [sp, #112]\n  stp d12, d13, [sp, #128]\n  stp d14, d15, [sp, #144]\n"
    "  mov x9, sp\n  str x9, [x0]\n  mov sp, x1\n"
    "  ldp x19, x20, [sp]\n  ldp x21, x22, [sp, #16]\n  ldp x23, x24, [sp, #32]\n  ldp x25, x26, [sp, #48]\n"
    "  ldp x27, x28, [sp, #64]\n  ldp x29, x30, [sp, #80]\n"
    "  ldp d8, d9, [sp, #96]\n  ldp d10, d11, [sp, #112]\n  ldp d12, d13, [sp, #128]\n  ldp d14, d15, [sp, #144]\n"
    "  add sp, sp, #160\n  ret\n");
#endif

namespace lily_sim {

void prepare_context(Context* context, char* low, char* high, void (*entry)()) {
#if defined(LILY_SIM_UCONTEXT)
  getcontext(&context->state);
  context->state.uc_stack.ss_sp = low;
  context->state.uc_stack.ss_size = size_t(high - low);
  context->state.uc_link = nullptr;
  makecontext(&context->state, entry, 0);
#else
  (void)low;
  auto top = reinterpret_cast<uintptr_t>(high) & ~uintptr_t(15);
#if defined(__x86_64__)
  // Six saved registers and the address that `ret` takes; at entry rsp is 16n + 8, as after a call.
  auto* sp = reinterpret_cast<uint64_t*>(top) - 8;
  std::memset(sp, 0, 8 * sizeof(uint64_t));
  sp[6] = reinterpret_cast<uint64_t>(entry);
#else
  auto* sp = reinterpret_cast<uint64_t*>(top) - 20;
  std::memset(sp, 0, 20 * sizeof(uint64_t));
  sp[11] = reinterpret_cast<uint64_t>(entry);  // x30
#endif
  context->stack_pointer = sp;
#endif
}

Stacks::Stacks() : bytes_(kCount * (kBytes + kStagger)) {
  void* p = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  memory_ = static_cast<char*>(p);
}

Stacks::~Stacks() { munmap(memory_, bytes_); }

constexpr uint64_t kMark = 0x5AFE57AC4C0FFEE5u;

void Stacks::mark(unsigned i) const {
  auto* p = reinterpret_cast<uint64_t*>(low(i));
  for (int k = 0; k < 4; k++) p[k] = kMark;
}

bool Stacks::overflowed(unsigned i) const {
  auto* p = reinterpret_cast<const uint64_t*>(low(i));
  for (int k = 0; k < 4; k++)
    if (p[k] != kMark) return true;
  return false;
}

}  // namespace lily_sim
