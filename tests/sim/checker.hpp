// What a checked launch verifies at every access: range, access mode, alignment, initialisation, races; and what it counts.
#pragma once
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "sandbox.hpp"
#include "traffic.hpp"
#include "worker.hpp"

namespace lily_sim {

// Who touched two bytes last. Epochs come from one counter, so a greater one is later, whatever it counts.
struct Cell {
  uint32_t write_epoch, write_sub, read_epoch, read_sub;
  uint32_t other_read, other_write;  // epoch of the last access by an earlier threadgroup of the interval
  uint16_t write_thread, read_thread;
  uint8_t write_mask, read_mask;  // which of the two bytes
  uint8_t flags;
};

constexpr uint64_t kShadowBytes = 65536;  // of data behind one page of shadow
struct ShadowPage {
  std::vector<Cell> cells;      // one for two bytes; empty until something writes here
  std::vector<uint64_t> reads;  // one bit for two bytes: read in the interval through a read-only buffer
  uint32_t reads_interval = 0, reads_dispatch = 0;
  uint32_t written = 0;  // epoch of the last write
};

struct Region {
  const char* name = nullptr;
  unsigned index = 0;      // buffer index
  bool threadgroup = false;
  bool bound = false;
  uint32_t access = 0;
  char* data = nullptr;        // in the sandbox
  uint64_t bytes = 0;
  const char* original = nullptr;  // where the device keeps it; shadow belongs to this address
  std::vector<ShadowPage*> pages;  // by offset, looked up when needed
  std::vector<Cell> cells;         // threadgroup arrays
  // Other buffers that share this memory: an access is right when one of them allows it.
  std::vector<unsigned> aliases;
};

class Checker {
 public:
  Checker();
  bool checking = false, counting = false;

  // Copies the buffers into the sandbox and fills `state.buffers`; returns a message when the launch itself is wrong.
  std::string begin_launch(LaunchState& state);
  // Copies back what may be written. The counters are complete afterwards.
  void end_launch(LaunchState& state, LilySimCounters& counters);
  void encoder_barrier();

  void begin_threadgroup(Worker& w);
  void end_threadgroup(Worker& w);
  char* add_threadgroup_array(unsigned index, const char* name, size_t bytes, const void* site);
  void threadgroup_barrier(uint32_t flags);
  void lanes_met(Worker& w, Simd& simd) {
    if (counting) traffic_.simdgroup_met(simd.index);
    (void)w;
  }
  // One access of the running lane; does not return when it is wrong. alignment: a power of two.
  void access(const void* address, uint64_t bytes, uint32_t kind, const void* site, unsigned alignment);

 private:
  // Who makes an access, and since when it may meet others.
  struct Now {
    uint32_t thread, simd, sub, epoch, since, kind;
    const void* site;
  };
  struct Recent {
    uint32_t epoch;
    std::string label;
  };
  [[noreturn]] void outside(const void* address, uint64_t bytes, uint32_t kind, const void* site);
  bool allowed(const Region& region, uint64_t offset, uint64_t bytes, bool write) const;
  [[noreturn]] void refuse(const Region& region, int64_t offset, uint64_t bytes, uint32_t kind, const void* site);
  void check_cells(Region& region, uint64_t offset, uint64_t bytes, uint32_t kind, const void* site);
  void check_writer(Region& region, Cell& cell, uint64_t offset, uint8_t mask, const Now& now);
  void check_read(Region& region, Cell& cell, uint64_t offset, uint8_t mask, const Now& now);
  void check_write(Region& region, Cell& cell, uint64_t offset, uint8_t mask, const Now& now);
  [[noreturn]] void uninitialised(const Region& region, uint64_t offset, const Now& now);
  void read_only(Region& region, uint64_t offset, uint64_t bytes, uint32_t kind, const void* site);
  [[noreturn]] void race(const Region& region, const Cell& cell, uint64_t offset, uint32_t kind, bool against_write, uint32_t epoch, const void* site, bool epoch_of_page = false);
  ShadowPage& page(Region& region, uint64_t offset);
  ShadowPage& new_page(Region& region, uint64_t key, size_t index);

  Sandbox sandbox_;
  Traffic traffic_;
  Region regions_[Sandbox::kSlots];
  std::unordered_map<uint64_t, std::unique_ptr<ShadowPage>> shadow_;
  std::vector<Recent> recent_;  // dispatches of this interval
  Worker* worker_ = nullptr;
  uint32_t epoch_ = 1;
  uint32_t interval_ = 1, dispatch_ = 1, group_ = 1;            // epochs at which they began
  uint32_t device_epoch_ = 1, threadgroup_epoch_ = 1;           // since the last threadgroup barrier with the flag
};

// The checker of the launch that runs; null when it runs unchecked.
extern Checker* active_checker;

}  // namespace lily_sim
