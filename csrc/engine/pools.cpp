#include "engine/pools.hpp"

#include <algorithm>
#include <cstring>

namespace lily {

namespace {

class CountedBuffer : public Buffer {
 public:
  CountedBuffer(BufferPtr inner, std::shared_ptr<MemoryBudget> budget, MemoryKind kind) : inner_(std::move(inner)), budget_(std::move(budget)), kind_(kind) {}
  ~CountedBuffer() override { budget_->release(kind_, inner_->bytes()); }
  uint8_t* host() override { return inner_->host(); }
  uint64_t bytes() const override { return inner_->bytes(); }
  void* handle() override { return inner_->handle(); }

 private:
  BufferPtr inner_;
  std::shared_ptr<MemoryBudget> budget_;
  MemoryKind kind_;
};

}  // namespace

BufferPtr allocate_counted(const DevicePtr& device, const std::shared_ptr<MemoryBudget>& budget, MemoryKind kind, uint64_t bytes, Need need) {
  budget->reserve(kind, bytes, need);
  try {
    return std::make_shared<CountedBuffer>(device->allocate(bytes), budget, kind);
  } catch (...) {
    budget->release(kind, bytes);
    throw;
  }
}

BufferPtr StatePool::take() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (free_.empty()) return nullptr;
  BufferPtr buffer = std::move(free_.back());
  free_.pop_back();
  return buffer;
}

StatePtr StatePool::acquire(Need need) {
  BufferPtr buffer = take();
  if (!buffer) try {
      buffer = allocate_counted(device_, budget_, MemoryKind::states, bytes_, need);
    } catch (const OutOfMemoryError&) {
      buffer = take();  // a session of another thread may have given one back meanwhile
      if (!buffer) throw;
    }
  return StatePtr(new BufferPtr(std::move(buffer)), [pool = weak_from_this()](const BufferPtr* p) {
    if (auto alive = pool.lock()) {
      std::lock_guard<std::mutex> lock(alive->mutex_);
      if (alive->free_.size() < kSpare) alive->free_.push_back(*p);
    }
    delete p;
  });
}

bool StatePool::trim() {
  std::vector<BufferPtr> spare;
  std::lock_guard<std::mutex> lock(mutex_);
  spare.swap(free_);
  return !spare.empty();
}

StatePtr StatePool::zero() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (zero_) return zero_;
  }
  BufferPtr buffer = allocate_counted(device_, budget_, MemoryKind::states, bytes_);
  std::memset(buffer->host(), 0, bytes_);
  StatePtr value(new BufferPtr(std::move(buffer)));
  std::lock_guard<std::mutex> lock(mutex_);
  if (!zero_) zero_ = value;
  return zero_;
}

KvBlock::~KvBlock() { cache_->free(index_); }

KvCache::KvCache(DevicePtr device, std::shared_ptr<MemoryBudget> budget, uint32_t layers, uint64_t block_bytes, std::function<void()> drain)
    : device_(std::move(device)), budget_(std::move(budget)), block_bytes_(block_bytes), drain_(std::move(drain)), k_(layers), v_(layers) {}

uint64_t KvCache::arena_bytes() const {
  uint64_t bytes = 0;
  for (auto* arenas : {&k_, &v_})
    for (const BufferPtr& arena : *arenas) bytes += arena ? arena->bytes() : 0;
  return bytes;
}

// By doubling, or by less where the limit is near. While an arena is copied the old one is there as well: it is in the budget too.
bool KvCache::grow(uint32_t blocks) {
  for (uint32_t more = std::max(capacity_ ? capacity_ : 4u, blocks);; more = std::max(blocks, more / 2)) {
    const uint64_t grown = uint64_t(capacity_ + more) * block_bytes_ * 2 * k_.size(), held = arena_bytes();
    const uint64_t reserved = (grown > held ? grown - held : 0) + uint64_t(capacity_) * block_bytes_;
    if (budget_->try_reserve(MemoryKind::kv, reserved)) {
      resize(capacity_ + more, reserved);
      return true;
    }
    if (more == blocks) return false;
  }
}

// `reserved` bytes of the budget are used for it; what is left of them at the end, or after a failure, is released. Arenas that already have the size, from
// an attempt that the device refused half-way, stay.
void KvCache::resize(uint32_t capacity, uint64_t reserved) {
  struct Settle {
    KvCache& kv;
    uint64_t counted;
    ~Settle() { kv.budget_->release(MemoryKind::kv, counted - kv.arena_bytes()); }
  } settle{*this, arena_bytes() + reserved};
  const uint64_t size = uint64_t(capacity) * block_bytes_, kept = uint64_t(std::min(capacity, capacity_)) * block_bytes_;
  drain_();
  if (capacity < capacity_) {  // first of all: no block is given out that an arena lacks, also where the device refuses half-way
    std::lock_guard<std::mutex> lock(mutex_);
    free_.erase(free_.lower_bound(capacity), free_.end());
    capacity_ = capacity;
  }
  for (auto* arenas : {&k_, &v_})
    for (BufferPtr& arena : *arenas) {
      if (arena && arena->bytes() == size) continue;
      BufferPtr fresh = size ? device_->allocate(size) : nullptr;
      if (arena && kept) std::memcpy(fresh->host(), arena->host(), kept);
      arena = std::move(fresh);
    }
  std::lock_guard<std::mutex> lock(mutex_);
  for (uint32_t i = capacity_; i < capacity; i++) free_.insert(i);
  capacity_ = capacity;
}

bool KvCache::shrink(bool any) {
  uint32_t end = capacity_;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto last = free_.rbegin(); last != free_.rend() && *last + 1 == end; ++last) end--;
  }
  const uint64_t copied = uint64_t(end) * block_bytes_;
  if (end == capacity_ || (!any && end > capacity_ / 2) || !budget_->try_reserve(MemoryKind::kv, copied)) return false;
  try {
    resize(end, copied);
  } catch (const OutOfMemoryError&) {  // from the device; an arena may have become smaller
  }
  return true;
}

void KvCache::prepare(uint32_t blocks) {
  size_t have;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    have = free_.size();
  }
  if (blocks > have) grow(uint32_t(blocks - have));
}

KvBlockPtr KvCache::allocate() {
  for (bool again = true;;) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!free_.empty()) {
        uint32_t index = *free_.begin();
        free_.erase(free_.begin());
        return std::make_shared<KvBlock>(shared_from_this(), index);
      }
    }
    // A session that is let go of gives blocks back, so that nothing need grow.
    if (grow(1) || budget_->make_room()) continue;
    if (!again) budget_->refuse(MemoryKind::kv, block_bytes_ * (2 * k_.size() + capacity_));
    again = false;  // a session of another thread may have given one back meanwhile
  }
}

void KvCache::free(uint32_t index) {
  std::lock_guard<std::mutex> lock(mutex_);
  free_.insert(index);
}

void KvCache::copy(uint32_t from, uint32_t to) {
  for (auto* arenas : {&k_, &v_})
    for (BufferPtr& arena : *arenas) std::memcpy(arena->host() + to * block_bytes_, arena->host() + from * block_bytes_, block_bytes_);
}

void KvCache::bind(const StepSymbols& use, BindingSet& bindings) const {
  for (size_t i = 0; i < k_.size(); i++) {
    bindings.set(use.k[i], {k_[i], 0});
    bindings.set(use.v[i], {v_[i], 0});
  }
}

}  // namespace lily
