#include "dispatch/staging/staging_pool.hpp"

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <string>

#include "core/base/fork.hpp"

namespace te_fl::dispatch {
namespace {

// Guards the lists of all pools. No device function is called while it is held.
constinit core::ForkMutex mutex(core::LockLevel::kStagingPool);
const core::ForkMutex::Registration registration(mutex);

// Rounds a size up, so that calls of similar sizes can share a buffer.
size_t rounded(size_t bytes) {
  const size_t step = bytes < (size_t{1} << 20) ? size_t{1} << 16 : size_t{1} << 20;
  return bytes > SIZE_MAX - 2 * step ? bytes : (bytes + step - 1) / step * step;
}

}  // namespace

StagingPool::Block::~Block() {
  if (memory_.data != nullptr) pool_->give_back(memory_);
}

void* StagingPool::Block::data() const noexcept {
  const auto at = reinterpret_cast<uintptr_t>(memory_.data);
  return reinterpret_cast<void*>((at + kAlignment - 1) / kAlignment * kAlignment);
}

StagingPool::~StagingPool() {
  for (const Memory& memory : idle_) free(memory);
}

void StagingPool::free(const Memory& memory) noexcept {
  if (memory.pinned) {
    devices::free_pinned(memory.device, memory.data);
  } else {
    devices::free(Device{}, memory.data);
  }
}

Result<StagingPool::Block> StagingPool::acquire(const Device& device, size_t bytes) {
  if (bytes > SIZE_MAX / 2) {
    return Status(StatusCode::kOutOfMemory,
                  "a staging buffer of " + std::to_string(bytes) + " bytes cannot be")
        .set_clean();
  }
  const size_t wanted = bytes + kAlignment;  // pinned memory may be unaligned
  Block block;
  block.pool_ = this;
  Memory outgrown;
  {
    std::lock_guard lock(mutex);
    auto fits = idle_.end(), largest = idle_.end();
    for (auto at = idle_.begin(); at != idle_.end(); ++at) {
      if (at->device != device) continue;
      if (at->bytes >= wanted && (fits == idle_.end() || at->bytes < fits->bytes)) fits = at;
      if (largest == idle_.end() || at->bytes > largest->bytes) largest = at;
    }
    if (fits != idle_.end()) {
      block.memory_ = *fits;
      idle_.erase(fits);
      return block;
    }
    // Replaces a smaller idle buffer, so that calls of growing size do not leave one buffer per
    // size.
    if (largest != idle_.end()) {
      outgrown = *largest;
      idle_.erase(largest);
    }
  }
  if (outgrown.data != nullptr) free(outgrown);
  Memory memory{device, nullptr, rounded(wanted), true};
  Result<void*> data = devices::allocate_pinned(device, memory.bytes);
  if (!data.ok()) {
    memory.pinned = false;
    data = devices::allocate(Device{}, memory.bytes);
  }
  if (!data.ok()) return std::move(data.status().wrap("a staging buffer").set_clean());
  memory.data = *data;
  block.memory_ = memory;
  return block;
}

void StagingPool::give_back(const Memory& memory) noexcept {
  Memory surplus;
  try {
    std::lock_guard lock(mutex);
    auto smallest = idle_.end();
    size_t count = 0;
    for (auto at = idle_.begin(); at != idle_.end(); ++at) {
      if (at->device != memory.device) continue;
      ++count;
      if (smallest == idle_.end() || at->bytes < smallest->bytes) smallest = at;
    }
    if (count < kKept) {
      idle_.push_back(memory);
    } else if (smallest->bytes < memory.bytes) {
      surplus = *smallest;
      *smallest = memory;
    } else {
      surplus = memory;
    }
  } catch (...) {  // no memory for the list entry: the buffer is freed
    surplus = memory;
  }
  if (surplus.data != nullptr) free(surplus);
}

int64_t StagingPool::held(const Device& device) const {
  const std::lock_guard lock(mutex);
  return std::count_if(idle_.begin(), idle_.end(), [&](const Memory& memory) {
    return memory.device == device && memory.pinned;
  });
}

void StagingPool::release(const Device& device) {
  std::vector<Memory> gone;
  {
    std::lock_guard lock(mutex);
    std::erase_if(idle_, [&](const Memory& memory) {
      if (memory.device != device) return false;
      gone.push_back(memory);
      return true;
    });
  }
  for (const Memory& memory : gone) free(memory);
}

void StagingPool::forget_after_fork() { idle_.clear(); }

}  // namespace te_fl::dispatch
