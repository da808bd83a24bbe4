#pragma once

#include <algorithm>
#include <mutex>
#include <thread>
#include <vector>

#include "core/base/fork.hpp"

namespace te_fl::core {

// The list of all live objects of class T, for threads that change something in each object.
// `mutex` guards the list only; a thread uses the objects without the mutex (see All). The
// destructor of an object therefore waits for threads that may be using the object (see remove()).
template <class T, ForkMutex& mutex>
class LivingObjects {
 public:
  // The caller holds the mutex.
  static std::vector<T*>& list() {
    static auto* const all = new std::vector<T*>;
    return *all;
  }
  // Call this first in an object's destructor. Takes the object out of the list and waits until no
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
  // Call this from a ForkedChild. Afterwards remove() waits only for threads that exist in the
  // child.
  static void after_fork_in_child() { all_made_ = made_here_; }

  // A snapshot of the list. Objects in the snapshot live at least as long as the All, except those
  // that the calling thread itself destroys.
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
  static inline constinit thread_local int made_here_ =
      0;  // objects of class All that the calling thread holds
};

}  // namespace te_fl::core
