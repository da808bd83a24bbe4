#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

#include "core/base/lock_level.hpp"

namespace te_fl::registry {

struct ThreadRecord;

// Serialises run() of an implementation that is not thread-safe. It records its owner, so that a
// recursive call returns an error instead of a deadlock, and a forked child can release the lock of
// a thread that does not exist. A cycle of threads that wait for each other's SerialLocks is an
// error too.
class SerialLock {
 public:
  enum class Taken {
    kYes,
    kOwn,       // not taken: the calling thread holds it
    kCrosswise  // not taken: waiting would be a deadlock
  };
  // `depth`: nesting depth of the op in this thread. `holds`: the thread holds another SerialLock;
  // only then can another thread be waiting for it.
  Taken lock(const ThreadRecord* self, uint32_t depth, bool holds);
  void unlock();
  // In a forked child: releases the lock unless the surviving thread holds it.
  void reset_after_fork(const ThreadRecord* self);

 private:
  bool wait(const ThreadRecord* self);

  std::mutex mutex_;
  core::LockRank rank_{core::LockLevel::kServing};  // rank under which the owner took it
  std::atomic<const ThreadRecord*> owner_{nullptr};
};

}  // namespace te_fl::registry
