#pragma once

#include <atomic>
#include <memory>
#include <mutex>

namespace te_fl::core {

// A mutex that fork() takes and releases, so that a child never inherits it locked by a thread that
// is not there. Define it constinit at namespace scope with a registration beside it:
//   constinit ForkMutex mutex(10);
//   const ForkMutex::Registration registration(mutex);
// At fork, mutexes are taken in ascending order of level; code that nests them does the same.
// Levels in use are listed in core/fork.cpp. The registration never goes: the mutex must be in
// static storage. What is made at first use is made under such a mutex or by made_once(): the guard
// of a function's static object would stay taken in a child of a fork that interrupts its making.
class ForkMutex {
 public:
  constexpr explicit ForkMutex(int level) : level_(level) {}
  ForkMutex(const ForkMutex&) = delete;
  ForkMutex& operator=(const ForkMutex&) = delete;
  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

  class Registration {
   public:
    explicit Registration(ForkMutex& mutex);
  };

 private:
  static void before_fork();
  static void after_fork();
  static void after_fork_in_child();

  std::mutex mutex_;
  ForkMutex* next_ = nullptr;
  int level_;
};

// Called in a forked child as soon as the mutexes are free again. Set while the library is loaded.
extern std::atomic<void (*)()> g_forked_child;

// What `at` points to, made by `make()` at first use and never freed. No caller waits for another,
// so that a child does not wait for a thread of its parent: of two that are made at once, the
// second is deleted.
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
