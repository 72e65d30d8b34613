#include "checker.hpp"

#include <algorithm>
#include <new>

namespace lily_sim {

Checker* active_checker = nullptr;

namespace {

bool writes(uint32_t kind) { return kind == kWrite || kind == kAtomicWrite || kind == kAtomicUpdate; }
bool atomic(uint32_t kind) { return kind >= kAtomicRead; }
const char* verb(uint32_t kind) {
  static const char* const names[] = {"reads", "writes", "reads atomically", "writes atomically", "updates atomically"};
  return names[kind];
}
constexpr size_t kKeptPages = 256;  // of shadow, a mebibyte each

unsigned long long number(uint64_t value) { return value; }

}  // namespace

Checker::Checker() {
  for (unsigned i = 0; i < Sandbox::kSlots; i++) {
    regions_[i].index = i;
    regions_[i].threadgroup = i >= Sandbox::kFirstThreadgroupSlot;
  }
}

std::string Checker::begin_launch(LaunchState& state) {
  const LilySimLaunch& launch = *state.launch;
  struct Range {
    const char* begin;
    uint64_t bytes;
    unsigned slot;
  };
  std::vector<Range> ranges;
  for (unsigned i = 0; i < Sandbox::kSlots; i++) {
    Region& r = regions_[i];
    r.bound = false;
    r.pages.clear();
    r.aliases.clear();
    if (i < kMaxBuffers) {
      r.name = nullptr;
      // An address inside of the slot also for what is not bound: a touch is recognised by it.
      state.buffers[i] = sandbox_.reserve(i, 0, 0);
    }
  }
  const uint32_t present = launch.present;
  auto bind = [&](unsigned i, const char* name, const void* data, uint64_t bytes, uint32_t access) {
    Region& r = regions_[i];
    r.name = name;
    r.original = static_cast<const char*>(data);
    r.bytes = bytes;
    r.access = access;
    if (data && bytes) ranges.push_back({r.original, bytes, i});
  };
  for (unsigned i = 0; i < launch.n_buffers && i < 20; i++) {
    const LilySimBuffer& b = launch.buffers[i];
    bind(i, b.name, b.data, b.bytes, b.access);
  }
  bind(20, "arguments", launch.args, launch.args_bytes, LILY_SIM_READ);
  bind(21, "mask of bound buffers", &present, sizeof present, LILY_SIM_READ);

  std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
  for (size_t i = 0; i < ranges.size();) {
    const char* begin = ranges[i].begin;
    const char* end = begin + ranges[i].bytes;
    size_t next = i + 1;
    for (; next < ranges.size() && ranges[next].begin < end; next++) end = std::max(end, ranges[next].begin + ranges[next].bytes);
    const unsigned slot = ranges[i].slot;
    Region& leader = regions_[slot];
    try {
      leader.data = sandbox_.reserve(slot, uint64_t(end - begin), unsigned(reinterpret_cast<uintptr_t>(begin) & 255));
    } catch (const std::bad_alloc&) {
      return std::string("no room to copy buffer '") + (leader.name ? leader.name : "") + "'";
    }
    std::memcpy(leader.data, begin, size_t(end - begin));
    leader.bound = true;
    for (size_t k = i; k < next; k++) {
      if (next - i > 1) leader.aliases.push_back(ranges[k].slot);
      regions_[ranges[k].slot].data = leader.data + (ranges[k].begin - begin);
      state.buffers[ranges[k].slot] = regions_[ranges[k].slot].data;
    }
    i = next;
  }
  dispatch_ = ++epoch_;
  recent_.push_back({dispatch_, std::string(launch.function) + (launch.label && *launch.label ? std::string(" at ") + launch.label : "")});
  if (counting) traffic_.begin_launch(launch);
  return "";
}

void Checker::end_launch(LaunchState& state, LilySimCounters& counters) {
  const LilySimLaunch& launch = *state.launch;
  for (unsigned i = 0; i < launch.n_buffers && i < 20; i++) {
    const LilySimBuffer& b = launch.buffers[i];
    if (b.data && b.bytes && (b.access & LILY_SIM_WRITE)) std::memcpy(b.data, regions_[i].data, b.bytes);
  }
  if (counting) traffic_.finish(counters);
  worker_ = nullptr;
}

void Checker::encoder_barrier() {
  interval_ = ++epoch_;
  recent_.clear();
  // What was noted before orders nothing any more.
  if (shadow_.size() > kKeptPages) {
    for (Region& r : regions_) r.pages.clear();
    shadow_.clear();
  }
}

void Checker::begin_threadgroup(Worker& w) {
  worker_ = &w;
  group_ = device_epoch_ = threadgroup_epoch_ = ++epoch_;
}

void Checker::end_threadgroup(Worker& w) {
  if (counting) traffic_.end_threadgroup(w.n_simds);
}

void Checker::threadgroup_barrier(uint32_t flags) {
  ++epoch_;
  if (flags & kMemoryDevice) device_epoch_ = epoch_;
  if (flags & kMemoryThreadgroup) threadgroup_epoch_ = epoch_;
}

char* Checker::add_threadgroup_array(unsigned index, const char* name, size_t bytes, const void* site) {
  const unsigned slot = Sandbox::kFirstThreadgroupSlot + index;
  if (slot >= Sandbox::kSlots) fail_at(site, "more than %u threadgroup arrays", Sandbox::kSlots - Sandbox::kFirstThreadgroupSlot);
  Region& r = regions_[slot];
  r.name = name;
  r.bytes = bytes;
  r.bound = true;
  r.access = LILY_SIM_READ | LILY_SIM_WRITE;
  r.data = sandbox_.reserve(slot, bytes, 0);
  r.cells.assign((bytes + 1) / 2, Cell{});
  return r.data;
}

void Checker::outside(const void* address, uint64_t bytes, uint32_t kind, const void* site) {
  fail_at(site, "out of range: %s %llu bytes at %p, which is in no bound buffer and no threadgroup array", verb(kind), number(bytes), address);
}

void Checker::refuse(const Region& region, int64_t offset, uint64_t bytes, uint32_t kind, const void* site) {
  const char* name = region.name ? region.name : "";
  const char* what = region.threadgroup ? "threadgroup array" : "buffer";
  if (!region.threadgroup && !region.bound) fail_at(site, "not bound: %s buffer %u '%s' at byte %lld", verb(kind), region.index, name, (long long)offset);
  const bool inside = offset >= 0 && uint64_t(offset) + bytes <= region.bytes;
  const std::string number_text = region.threadgroup ? "" : " " + std::to_string(region.index);
  if (inside)
    fail_at(site, "access: %s %s%s '%s', which is bound for %s only, at byte %lld", verb(kind), what, number_text.c_str(), name,
            region.access & LILY_SIM_WRITE ? "writing" : "reading", (long long)offset);
  fail_at(site, "out of range: %s %llu bytes at byte %lld of %s%s '%s' of %llu bytes", verb(kind), number(bytes), (long long)offset, what, number_text.c_str(), name,
          number(region.bytes));
}

bool Checker::allowed(const Region& region, uint64_t offset, uint64_t bytes, bool write) const {
  const uint32_t needed = write ? LILY_SIM_WRITE : LILY_SIM_READ;
  if (region.aliases.empty()) return offset + bytes <= region.bytes && (region.access & needed);
  for (unsigned slot : region.aliases) {
    const Region& r = regions_[slot];
    const uint64_t begin = uint64_t(r.data - region.data);
    if (offset >= begin && offset + bytes <= begin + r.bytes && (r.access & needed)) return true;
  }
  return false;
}

inline ShadowPage& Checker::page(Region& region, uint64_t offset) {
  const uint64_t at = reinterpret_cast<uintptr_t>(region.original);
  const size_t index = size_t((at + offset) / kShadowBytes - at / kShadowBytes);
  if (index < region.pages.size() && region.pages[index]) return *region.pages[index];
  return new_page(region, (at + offset) / kShadowBytes, index);
}

ShadowPage& Checker::new_page(Region& region, uint64_t key, size_t index) {
  if (index >= region.pages.size()) region.pages.resize(index + 1, nullptr);
  auto& slot = shadow_[key];
  if (!slot) slot = std::make_unique<ShadowPage>();
  region.pages[index] = slot.get();
  return *slot;
}

void Checker::access(const void* address, uint64_t bytes, uint32_t kind, const void* site, unsigned alignment) {
  const unsigned slot = sandbox_.slot_of(address);
  if (slot == Sandbox::kSlots) {
    const auto* p = static_cast<const char*>(address);
    const uint32_t thread = worker_->lane->thread;
    if (p >= worker_->stacks.low(thread) && p < worker_->stacks.high(thread)) return;
    if (in_library(address)) return;
    outside(address, bytes, kind, site);
  }
  Region& r = regions_[slot];
  const bool write = writes(kind);
  const int64_t offset = r.bound ? static_cast<const char*>(address) - r.data : int64_t((reinterpret_cast<uintptr_t>(address) & (Sandbox::kSlotBytes - 1)) - Sandbox::kStart);
  if (!r.bound || offset < 0 || !allowed(r, uint64_t(offset), bytes, write)) refuse(r, offset, bytes, kind, site);
  if (kind == kAtomicUpdate && !allowed(r, uint64_t(offset), bytes, false)) refuse(r, offset, bytes, kRead, site);
  if (reinterpret_cast<uintptr_t>(address) & (alignment - 1))
    fail_at(site, "misaligned: %s %llu bytes at byte %lld of %s '%s', which is no multiple of %u", verb(kind), number(bytes), (long long)offset,
            r.threadgroup ? "threadgroup array" : "buffer", r.name ? r.name : "", alignment);
  if (counting && !r.threadgroup) {
    const uint32_t thread = worker_->lane->thread;
    unsigned buffer = slot;
    uint64_t at = uint64_t(offset);
    for (unsigned a : r.aliases) {
      const uint64_t begin = uint64_t(regions_[a].data - r.data);
      if (at >= begin && at + bytes <= begin + regions_[a].bytes && (regions_[a].access & (write ? LILY_SIM_WRITE : LILY_SIM_READ))) {
        buffer = a;
        at -= begin;
        break;
      }
    }
    if (kind != kWrite && kind != kAtomicWrite) traffic_.log(thread / kSimdWidth, thread % kSimdWidth, buffer, at, uint32_t(bytes), false, site);
    if (write) traffic_.log(thread / kSimdWidth, thread % kSimdWidth, buffer, at, uint32_t(bytes), true, site);
  }
  if (!checking) return;
  if (r.threadgroup || !r.aliases.empty() || (r.access & LILY_SIM_WRITE))
    check_cells(r, uint64_t(offset), bytes, kind, site);
  else
    read_only(r, uint64_t(offset), bytes, kind, site);
}

// Nothing of this dispatch writes here: the read is noted for later dispatches, and must not meet a write of an earlier one.
void Checker::read_only(Region& region, uint64_t offset, uint64_t bytes, uint32_t kind, const void* site) {
  while (bytes) {
    ShadowPage& p = page(region, offset);
    const uint64_t in_page = (reinterpret_cast<uintptr_t>(region.original) + offset) % kShadowBytes;
    const uint64_t count = std::min(bytes, kShadowBytes - in_page);
    if (p.reads_interval != interval_) {
      p.reads.assign(kShadowBytes / 2 / 64, 0);
      p.reads_interval = interval_;
    }
    p.reads_dispatch = dispatch_;
    for (uint64_t c = in_page / 2; c <= (in_page + count - 1) / 2; c++) {
      if (p.written >= interval_ && p.cells[c].write_epoch >= interval_) race(region, p.cells[c], offset, kind, true, p.cells[c].write_epoch, site);
      p.reads[c / 64] |= uint64_t(1) << (c % 64);
    }
    offset += count;
    bytes -= count;
  }
}

constexpr uint8_t kWriteAtomic = 1, kReadAtomic = 2, kReadSimd = 4, kReadMany = 8;

// What a read and a write have in common: the last writer must be ordered before.
inline __attribute__((always_inline)) void Checker::check_writer(Region& region, Cell& cell, uint64_t offset, uint8_t mask, const Now& now) {
  const bool both_atomic = atomic(now.kind) && (cell.flags & kWriteAtomic);
  if (!both_atomic && cell.write_epoch >= now.since && (cell.write_mask & mask)) {
    const bool same_simd = cell.write_thread / kSimdWidth == now.simd;
    if (cell.write_epoch < group_ || (cell.write_epoch == now.epoch && cell.write_thread != now.thread && !(same_simd && cell.write_sub != now.sub)))
      race(region, cell, offset, now.kind, true, cell.write_epoch, now.site);
  }
  if (!atomic(now.kind) && cell.other_write && cell.other_write >= now.since) race(region, cell, offset, now.kind, true, cell.other_write, now.site);
}

inline __attribute__((always_inline)) void Checker::check_write(Region& region, Cell& cell, uint64_t offset, uint8_t mask, const Now& now) {
  const bool is_atomic = atomic(now.kind);
  if (region.threadgroup && now.kind == kAtomicUpdate && cell.write_epoch < group_) uninitialised(region, offset, now);
  check_writer(region, cell, offset, mask, now);
  const bool reads_atomic = is_atomic && (cell.flags & kReadAtomic);
  if (!reads_atomic && cell.read_epoch >= now.since && (cell.read_mask & mask)) {
    if (cell.read_epoch < group_) race(region, cell, offset, now.kind, false, cell.read_epoch, now.site);
    if (cell.read_epoch == now.epoch) {
      const bool same_simd = cell.read_thread / kSimdWidth == now.simd;
      const bool ordered = !(cell.flags & kReadMany) && same_simd && cell.read_sub != now.sub;
      const bool own = !(cell.flags & (kReadMany | kReadSimd)) && cell.read_thread == now.thread;
      if (!ordered && !own) race(region, cell, offset, now.kind, false, cell.read_epoch, now.site);
    }
  }
  if (!reads_atomic && cell.other_read && cell.other_read >= now.since) race(region, cell, offset, now.kind, false, cell.other_read, now.site);
  if (cell.write_epoch < group_) cell.other_write = cell.write_epoch >= now.since ? cell.write_epoch : 0;
  cell.write_mask = cell.write_epoch == now.epoch && cell.write_thread == now.thread ? uint8_t(cell.write_mask | mask) : mask;
  cell.write_epoch = now.epoch;
  cell.write_sub = now.sub;
  cell.write_thread = uint16_t(now.thread);
  cell.flags = uint8_t((cell.flags & ~kWriteAtomic) | (is_atomic ? kWriteAtomic : 0));
}

inline __attribute__((always_inline)) void Checker::check_read(Region& region, Cell& cell, uint64_t offset, uint8_t mask, const Now& now) {
  const bool is_atomic = atomic(now.kind);
  // The usual case of shared data: written before, and already known to be read by several simdgroups.
  const bool written_before = cell.write_epoch >= group_ && cell.write_epoch != now.epoch;
  if (written_before && cell.read_epoch == now.epoch && (cell.flags & (kReadMany | kReadAtomic)) == kReadMany && (cell.read_mask & mask) == mask && !cell.other_write) return;
  if (region.threadgroup && cell.write_epoch < group_) uninitialised(region, offset, now);
  check_writer(region, cell, offset, mask, now);
  if (cell.read_epoch != now.epoch) {
    if (cell.read_epoch < group_) {
      const bool counts = cell.read_epoch >= now.since && !(is_atomic && (cell.flags & kReadAtomic));
      cell.other_read = counts ? cell.read_epoch : 0;
    }
    cell.read_epoch = now.epoch;
    cell.read_mask = mask;
    cell.flags = uint8_t((cell.flags & kWriteAtomic) | (is_atomic ? kReadAtomic : 0));
  } else {
    cell.read_mask |= mask;
    if (!is_atomic) cell.flags &= uint8_t(~kReadAtomic);
    if (cell.read_thread / kSimdWidth != now.simd) {
      cell.flags |= kReadMany;
    } else if (cell.read_sub == now.sub) {
      if (cell.read_thread != now.thread) cell.flags |= kReadSimd;
    } else {
      cell.flags &= uint8_t(~kReadSimd);
    }
  }
  cell.read_sub = now.sub;
  cell.read_thread = uint16_t(now.thread);
}

void Checker::uninitialised(const Region& region, uint64_t offset, const Now& now) {
  fail_at(now.site, "uninitialised: %s threadgroup array '%s' at byte %llu, which no thread has written", verb(now.kind), region.name, number(offset));
}

void Checker::check_cells(Region& region, uint64_t offset, uint64_t bytes, uint32_t kind, const void* site) {
  const Lane& l = *worker_->lane;
  const bool write = writes(kind);
  const Now now{l.thread,
                l.simd->index,
                region.threadgroup ? l.simd->threadgroup_epoch : l.simd->device_epoch,
                region.threadgroup ? threadgroup_epoch_ : device_epoch_,
                region.threadgroup ? group_ : interval_,
                kind,
                site};
  const uint64_t base = region.threadgroup ? 0 : reinterpret_cast<uintptr_t>(region.original);
  const uint64_t end = base + offset + bytes;
  for (uint64_t at = base + offset; at < end;) {
    Cell* cells = region.cells.data();
    uint64_t page_end = end, first = 0;
    ShadowPage* p = nullptr;
    if (!region.threadgroup) {
      p = &page(region, at - base);
      if (p->cells.empty()) p->cells.resize(kShadowBytes / 2);
      cells = p->cells.data();
      first = at / kShadowBytes * kShadowBytes;
      page_end = std::min(end, first + kShadowBytes);
      if (write) p->written = device_epoch_;
    }
    while (at < page_end) {
      const uint64_t here = (at & 1) || at + 1 == end ? 1 : 2;
      const uint8_t mask = here == 2 ? 3 : at & 1 ? 2 : 1;
      const uint64_t c = (at - first) / 2;
      if (write) {
        if (p && p->reads_interval == interval_ && (p->reads[c / 64] >> (c % 64) & 1)) race(region, cells[c], at - base, kind, false, p->reads_dispatch, site, true);
        check_write(region, cells[c], at - base, mask, now);
      } else {
        check_read(region, cells[c], at - base, mask, now);
      }
      at += here;
    }
  }
}

void Checker::race(const Region& region, const Cell& cell, uint64_t offset, uint32_t kind, bool against_write, uint32_t epoch, const void* site, bool epoch_of_page) {
  const char* what = region.threadgroup ? "threadgroup array" : "buffer";
  const char* name = region.name ? region.name : "";
  const char* did = against_write ? "wrote" : "read";
  if (epoch >= group_ && epoch) {
    const uint32_t other = against_write ? cell.write_thread : cell.read_thread;
    const uint32_t thread = worker_->lane->thread;
    const bool one_simd = other / kSimdWidth == thread / kSimdWidth;
    fail_at(site, "race: %s %s '%s' at byte %llu, which thread %u %s, with no %s%s in between", verb(kind), what, name, number(offset), other, did,
            one_simd ? "simdgroup_barrier or threadgroup_barrier" : "threadgroup_barrier", region.threadgroup ? " over threadgroup memory" : " over device memory");
  }
  // A page remembers the last dispatch that read it: another buffer on the page may be what this dispatch read.
  if (epoch >= dispatch_ && epoch_of_page)
    fail_at(site, "race: %s %s '%s' at byte %llu, which another threadgroup, or a dispatch before this one with no barrier of the encoder in between, %s", verb(kind), what, name, number(offset), did);
  if (epoch >= dispatch_) fail_at(site, "race: %s %s '%s' at byte %llu, which another threadgroup of this dispatch %s", verb(kind), what, name, number(offset), did);
  std::string label = "an earlier dispatch";
  for (const Recent& r : recent_)
    if (epoch >= r.epoch) label = r.label;
  fail_at(site, "race: %s %s '%s' at byte %llu, which %s %s, with no barrier of the encoder in between", verb(kind), what, name, number(offset), label.c_str(), did);
}

}  // namespace lily_sim
