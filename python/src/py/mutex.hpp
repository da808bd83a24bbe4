// The binding's mutexes, which are usable in a forked child.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>

namespace te_fl::python {

// The handling of a mutex at fork().
enum class AtFork : uint8_t {
  // fork() locks the mutex first, so a child never sees a half-changed state. The owner must not
  // wait for anything, and must not create or destroy a Mutex.
  kTaken,
  // The mutex is unlocked in a child. If another thread of the parent held it at the fork,
  // interruptions() is one higher in the child. For mutexes that are held while ops run.
  kFreedInChild,
};

// A mutex that is unlocked in a forked child unless the forking thread holds it. Use it as a member
// or at namespace scope: the guard of a function-local static would stay locked in a child if the
// fork interrupts the construction. tools/check_layering.py refuses std::mutex in the binding.
class Mutex {
 public:
  explicit Mutex(AtFork at_fork);
  ~Mutex();
  Mutex(const Mutex&) = delete;
  Mutex& operator=(const Mutex&) = delete;

  void lock() {
    mutex_.lock();
    owner_.store(std::this_thread::get_id(), std::memory_order_relaxed);
  }
  void unlock() {
    owner_.store(std::thread::id(), std::memory_order_relaxed);
    mutex_.unlock();
  }
  // The number of forks, from the first process to this one, at which a thread that the child does
  // not have held this mutex. A change means that the guarded state may be half changed. Read it
  // under the mutex.
  uint32_t interruptions() const noexcept { return interruptions_; }

 private:
  friend struct MutexList;

  std::mutex mutex_;
  std::atomic<std::thread::id> owner_;
  uint32_t interruptions_ = 0;
  const AtFork at_fork_;
  Mutex *previous_ = nullptr, *next_ = nullptr;  // links in the list of all mutexes
};

}  // namespace te_fl::python
