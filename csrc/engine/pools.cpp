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

 private:
  BufferPtr inner_;
  std::shared_ptr<MemoryBudget> budget_;
  MemoryKind kind_;
};

}  // namespace

BufferPtr allocate_counted(const DevicePtr& device, const std::shared_ptr<MemoryBudget>& budget, MemoryKind kind, uint64_t bytes) {
  budget->reserve(kind, bytes);
  try {
    return std::make_shared<CountedBuffer>(device->allocate(bytes), budget, kind);
  } catch (...) {
    budget->release(kind, bytes);
    throw;
  }
}

StatePtr StatePool::acquire() {
  BufferPtr buffer;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!free_.empty()) {
      buffer = std::move(free_.back());
      free_.pop_back();
    }
  }
  if (!buffer) buffer = allocate_counted(device_, budget_, MemoryKind::states, bytes_);
  return StatePtr(new BufferPtr(std::move(buffer)), [pool = weak_from_this()](const BufferPtr* p) {
    if (auto alive = pool.lock()) {
      std::lock_guard<std::mutex> lock(alive->mutex_);
      if (alive->free_.size() < kSpare) alive->free_.push_back(*p);
    }
    delete p;
  });
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

void KvCache::grow() {
  uint32_t capacity = capacity_ ? capacity_ * 2 : 4;
  uint64_t added = uint64_t(capacity - capacity_) * block_bytes_ * 2 * k_.size();
  budget_->reserve(MemoryKind::kv, added);
  try {
    drain_();
    for (auto* arenas : {&k_, &v_})
      for (BufferPtr& arena : *arenas) {
        BufferPtr larger = device_->allocate(uint64_t(capacity) * block_bytes_);
        if (arena) std::memcpy(larger->host(), arena->host(), uint64_t(capacity_) * block_bytes_);
        arena = larger;
      }
  } catch (...) {
    budget_->release(MemoryKind::kv, added);
    throw;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  for (uint32_t i = capacity; i-- > capacity_;) free_.push_back(i);
  capacity_ = capacity;
}

KvBlockPtr KvCache::allocate() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!free_.empty()) {
      uint32_t index = free_.back();
      free_.pop_back();
      return std::make_shared<KvBlock>(shared_from_this(), index);
    }
  }
  grow();
  return allocate();
}

void KvCache::free(uint32_t index) {
  std::lock_guard<std::mutex> lock(mutex_);
  free_.push_back(index);
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
