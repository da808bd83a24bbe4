// The binding's mutexes, which a forked child finds free.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>

namespace te_fl::python {

// Says what fork() does with a mutex.
enum class AtFork : uint8_t {
  // fork() takes it first, so that a child never sees its state half changed. Its owner may wait
  // for nothing, and makes and destroys no Mutex.
  kTaken,
  // A child finds it free. If another thread of the parent held it at the fork, interruptions() is
  // one higher in the child.
  // For mutexes that are held while ops run.
  kFreedInChild,
};

// A mutex that a forked child finds free, unless the thread that forked holds it. It is a member or
// at namespace scope: the guard of a function's static object would stay taken in a child of a fork
// that interrupts its making. tools/check_layering.py refuses the standard library's in the
// binding.
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
  // Counts the forks, on the way from the first process to this one, at which a thread held it that
  // the child does not have: what it guards may be half changed. Read under the mutex.
  uint32_t interruptions() const noexcept { return interruptions_; }

 private:
  friend struct MutexList;

  std::mutex mutex_;
  std::atomic<std::thread::id> owner_;
  uint32_t interruptions_ = 0;
  const AtFork at_fork_;
  Mutex *previous_ = nullptr, *next_ = nullptr;  // among all that exist
};

}  // namespace te_fl::python
