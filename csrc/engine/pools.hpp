// State values and K/V blocks: pooled, reference-counted, inside the budget.
#pragma once
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "device/device.hpp"
#include "engine/memory.hpp"
#include "model/programs.hpp"

namespace lily {

// A buffer whose bytes are in the budget for as long as anyone holds it.
BufferPtr allocate_counted(const DevicePtr& device, const std::shared_ptr<MemoryBudget>& budget, MemoryKind kind, uint64_t bytes, Need need = Need::work);

// Immutable once written. A dropped value's buffer goes back to the pool; submissions run in order, so that the next writer comes after every reader.
using StatePtr = std::shared_ptr<const BufferPtr>;

class StatePool : public std::enable_shared_from_this<StatePool> {
 public:
  StatePool(DevicePtr device, std::shared_ptr<MemoryBudget> budget, uint64_t bytes) : device_(std::move(device)), budget_(std::move(budget)), bytes_(bytes) {}
  StatePtr acquire(Need need);
  StatePtr zero();  // the state before the first token
  uint64_t bytes() const { return bytes_; }
  bool trim();  // lets go of spare buffers; false when there were none

 private:
  BufferPtr take();  // a spare one, or null
  static constexpr size_t kSpare = 4;  // free buffers kept for the next step
  DevicePtr device_;
  std::shared_ptr<MemoryBudget> budget_;
  uint64_t bytes_;
  std::mutex mutex_;
  std::vector<BufferPtr> free_;
  StatePtr zero_;
};

class KvCache;

// One block of 256 tokens in every layer's arenas; returned to the cache when the last session lets go.
class KvBlock {
 public:
  KvBlock(std::shared_ptr<KvCache> cache, uint32_t index) : cache_(std::move(cache)), index_(index) {}
  ~KvBlock();
  KvBlock(const KvBlock&) = delete;
  uint32_t index() const { return index_; }

 private:
  std::shared_ptr<KvCache> cache_;
  uint32_t index_;
};
using KvBlockPtr = std::shared_ptr<KvBlock>;

class KvCache : public std::enable_shared_from_this<KvCache> {
 public:
  // `drain` waits until nothing is in flight: growing moves the arenas.
  KvCache(DevicePtr device, std::shared_ptr<MemoryBudget> budget, uint32_t layers, uint64_t block_bytes, std::function<void()> drain);
  KvBlockPtr allocate();
  void prepare(uint32_t blocks);  // grows once, for so many more blocks
  bool shrink(bool any = false);  // gives back the free end of the arenas when it is at least half of them, or any; false when nothing changed
  void copy(uint32_t from, uint32_t to);  // contents of a block, all layers; nothing in flight may write `from`
  void bind(const StepSymbols& use, BindingSet& bindings) const;
  const BufferPtr& k(uint32_t layer) const { return k_[layer]; }
  const BufferPtr& v(uint32_t layer) const { return v_[layer]; }
  uint64_t block_bytes() const { return block_bytes_; }

 private:
  friend class KvBlock;
  bool grow(uint32_t blocks);  // by at least so many; false when the limit does not allow it
  void resize(uint32_t capacity, uint64_t reserved);
  uint64_t arena_bytes() const;
  void free(uint32_t index);
  DevicePtr device_;
  std::shared_ptr<MemoryBudget> budget_;
  uint64_t block_bytes_;
  std::function<void()> drain_;
  std::vector<BufferPtr> k_, v_;
  uint32_t capacity_ = 0;
  std::mutex mutex_;
  std::set<uint32_t> free_;  // the lowest is taken first, so that the end of the arenas becomes free
};

}  // namespace lily
