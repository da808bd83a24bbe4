#pragma once

#include <algorithm>
#include <mutex>
#include <thread>
#include <vector>

#include "core/base/fork.hpp"

namespace te_fl::core {

// The list of all objects of class T, for threads that change something in each of them. A thread
// uses them without `mutex`, which guards the list alone, so an object that is being destroyed
// waits for the threads that may be using it.
template <class T, ForkMutex& mutex>
class LivingObjects {
 public:
  // The caller holds the mutex.
  static std::vector<T*>& list() {
    static auto* const all = new std::vector<T*>;
    return *all;
  }
  // The first step of an object's destructor. Takes the object out of the list and returns when no
  // other thread has an All that was made before. The caller does not hold the mutex.
  static void remove(T* object) {
    std::unique_lock lock(mutex);
    std::erase(list(), object);
    while (all_made_ != made_here_) {
      lock.unlock();
      std::this_thread::yield();
      lock.lock();
    }
  }
  // To be called by a ForkedChild: threads that are not in the child are not waited for.
  static void after_fork_in_child() { all_made_ = made_here_; }

  // The objects that are in the list when this is made. They live at least as long as this, except
  // those that the calling thread itself destroys.
  class All {
   public:
    All() {
      const std::lock_guard lock(mutex);
      objects_ = list();
      ++all_made_, ++made_here_;
    }
    ~All() {
      const std::lock_guard lock(mutex);
      --all_made_, --made_here_;
    }
    All(const All&) = delete;
    All& operator=(const All&) = delete;

    auto begin() const { return objects_.begin(); }
    auto end() const { return objects_.end(); }

   private:
    std::vector<T*> objects_;
  };

 private:
  static inline int all_made_ = 0;  // objects of class All in the process; the mutex guards it
  static inline constinit thread_local int made_here_ = 0;  // those of the calling thread
};

}  // namespace te_fl::core
