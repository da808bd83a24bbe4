#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

#include "core/base/lock_level.hpp"

namespace te_fl::registry {

struct ThreadRecord;

// Serialises the run() of an implementation that is not thread-safe. Knows its owner, so that a
// recursion is an error rather than a deadlock, and so that a forked child can tell a dead owner.
// So is waiting for a thread that, by way of such locks, waits for the caller.
class SerialLock {
 public:
  enum class Taken {
    kYes,
    kOwn,       // no: the calling thread holds it already
    kCrosswise  // no: who holds it waits for what the calling thread holds
  };
  // `depth`: of the op, among those that the thread is inside. `holds`: whether the thread holds
  // another SerialLock; only then anybody can be waiting for it.
  Taken lock(const ThreadRecord* self, uint32_t depth, bool holds);
  void unlock();
  // In a forked child: free it unless the surviving thread holds it.
  void reset_after_fork(const ThreadRecord* self);

 private:
  bool wait(const ThreadRecord* self);

  std::mutex mutex_;
  core::LockRank rank_{core::LockLevel::kServing};  // of the owner's taking
  std::atomic<const ThreadRecord*> owner_{nullptr};
};

}  // namespace te_fl::registry
