#pragma once

#include <mutex>

namespace te_fl::core {

// A mutex that fork() takes and releases, so that a child never inherits it locked by a thread that
// is not there. Define it constinit at namespace scope with a registration beside it:
//   constinit ForkMutex mutex(10);
//   const ForkMutex::Registration registration(mutex);
// At fork, mutexes are taken in ascending order of level; code that nests them does the same.
// Levels in use are listed in core/fork.cpp. The registration never goes: the mutex must be in
// static storage.
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

  std::mutex mutex_;
  ForkMutex* next_ = nullptr;
  int level_;
};

}  // namespace te_fl::core
