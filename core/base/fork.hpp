#pragma once

#include <atomic>
#include <memory>

#include "core/base/lock_level.hpp"

namespace te_fl::core {

// A mutex that is held across fork(), so that a child never inherits it locked by a thread that
// does not exist in the child. Define it constinit at namespace scope with a registration beside
// it:
//   constinit ForkMutex mutex(LockLevel::kPlans);
//   const ForkMutex::Registration registration(mutex);
// fork() takes the mutexes in the order of their levels. A registration is permanent, so the mutex
// must be in static storage. Create lazy objects under such a mutex or with made_once(), not as a
// function's static object: if fork() interrupts the creation, the guard of the static object stays
// locked in the child.
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

// Repairs state that threads of the parent were using. After fork(), the child calls `repair` once
// the mutexes are released, in the order of the levels. The child has one thread then, so `repair`
// takes no lock. Define it at namespace scope beside the state.
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

// Returns the object that `at` points to. The first call creates it by `make()`; it is never freed.
// No caller waits for another, so a forked child never waits for a thread of its parent: if two
// threads create the object at once, the second object is deleted.
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
