#include "registry/serial_lock.hpp"

#include <algorithm>
#include <new>
#include <vector>

#include "core/base/fork.hpp"

namespace te_fl::registry {
namespace {

// Guards the list of threads that wait for one SerialLock while they hold another.
constinit core::ForkMutex waits_mutex(core::LockLevel::kSerialWaits);
const core::ForkMutex::Registration waits_registration(waits_mutex);

struct Wait {
  const ThreadRecord* thread;  // only compared: the thread may have ended
  const SerialLock* lock;
};
std::vector<Wait>& waits() {
  static auto* const all = new std::vector<Wait>;
  return *all;
}
[[maybe_unused]] const std::vector<Wait>& waits_made_at_load = waits();

// Run in a forked child, where no other thread can be waiting.
void forget_waits() { waits().clear(); }
const core::ForkedChild waits_forked_child(core::LockLevel::kSerialWaits, &forget_waits);

// The lock that a thread waits for while it holds another; null if none. The caller holds the
// mutex.
const SerialLock* awaited(const ThreadRecord* thread) {
  const auto at = std::ranges::find(waits(), thread, &Wait::thread);
  return at != waits().end() ? at->lock : nullptr;
}

}  // namespace

// Deadlock detection. Each thread records itself as owner of its locks, and records the lock it
// waits for before it waits. The last thread to close a cycle of waits therefore sees the whole
// cycle.
bool SerialLock::wait(const ThreadRecord* self) {
  {
    const std::lock_guard lock(waits_mutex);
    const SerialLock* next = this;
    while (next != nullptr) {
      const ThreadRecord* owner = next->owner_.load(std::memory_order_acquire);
      if (owner == self) return false;
      next = owner != nullptr ? awaited(owner) : nullptr;
    }
    waits().push_back({self, this});
  }
  mutex_.lock();
  const std::lock_guard lock(waits_mutex);
  std::erase_if(waits(), [&](const Wait& w) { return w.thread == self; });
  return true;
}

SerialLock::Taken SerialLock::lock(const ThreadRecord* self, uint32_t depth, bool holds) {
  if (owner_.load(std::memory_order_relaxed) == self) return Taken::kOwn;
  const core::LockRank rank{core::LockLevel::kServing,
                            core::serving_order(depth, core::Serving::kSerial)};
  core::check_lock(rank);
  if (!mutex_.try_lock()) {
    if (!holds) {
      mutex_.lock();
    } else if (!wait(self)) {
      core::check_unlock(rank);
      return Taken::kCrosswise;
    }
  }
  rank_ = rank;
  owner_.store(self, std::memory_order_release);
  return Taken::kYes;
}

void SerialLock::unlock() {
  core::check_unlock(rank_);
  owner_.store(nullptr, std::memory_order_relaxed);
  mutex_.unlock();
}

void SerialLock::reset_after_fork(const ThreadRecord* self) {
  if (owner_.load(std::memory_order_relaxed) == self && self != nullptr) return;
  owner_.store(nullptr, std::memory_order_relaxed);
  new (&mutex_) std::mutex;
}

}  // namespace te_fl::registry
