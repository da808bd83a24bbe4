#pragma once

#include <atomic>
#include <memory>

#include "core/base/lock_level.hpp"

namespace te_fl::core {

// A mutex that fork() takes and releases, so that a child never inherits it locked by a thread that
// is not there. Define it constinit at namespace scope with a registration beside it:
//   constinit ForkMutex mutex(LockLevel::kPlans);
//   const ForkMutex::Registration registration(mutex);
// At fork, mutexes are taken in the order of their levels. The registration never goes: the mutex
// must be in static storage. What is made at first use is made under such a mutex or by
// made_once(): the guard of a function's static object would stay taken in a child of a fork that
// interrupts its making.
class ForkMutex {
 public:
  constexpr explicit ForkMutex(LockLevel level) : mutex_(level) {}
  ForkMutex(const ForkMutex&) = delete;
  ForkMutex& operator=(const ForkMutex&) = delete;
  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

  class Registration {
   public:
    explicit Registration(ForkMutex& mutex);
  };

 private:
  friend class ForkedChild;
  static void watch_forks();
  static void before_fork();
  static void after_fork();
  static void after_fork_in_child();

  Mutex mutex_;
  ForkMutex* next_ = nullptr;
};

// Makes state whole again that threads of the parent had a part in: `repair` is called in a forked
// child as soon as the mutexes are free again, in the order of the levels. The child has one thread
// then, so `repair` takes no lock. Define it at namespace scope beside the state.
class ForkedChild {
 public:
  ForkedChild(LockLevel level, void (*repair)()) noexcept;
  ForkedChild(const ForkedChild&) = delete;
  ForkedChild& operator=(const ForkedChild&) = delete;

 private:
  friend class ForkMutex;
  LockLevel level_;
  void (*repair_)();
  ForkedChild* next_ = nullptr;
};

// The object that `at` points to, made by `make()` at first use and never freed. No caller waits
// for another, so that a child does not wait for a thread of its parent: of two that are made at
// once, the second is deleted.
template <class T, class F>
T& made_once(std::atomic<T*>& at, F&& make) {
  T* made = at.load(std::memory_order_acquire);
  if (made != nullptr) [[likely]]
    return *made;
  std::unique_ptr<T> mine(make());
  if (at.compare_exchange_strong(made, mine.get(), std::memory_order_acq_rel))
    return *mine.release();
  return *made;
}

}  // namespace te_fl::core
