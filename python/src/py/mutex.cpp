#include "py/mutex.hpp"

#include <pthread.h>

#include <new>

namespace te_fl::python {

// A linked list of all mutexes. fork() locks the list's mutex first, and then each kTaken mutex.
struct MutexList {
  std::mutex mutex;
  Mutex* first = nullptr;
  bool watches_forks = false;

  void add(Mutex& added);
  void remove(const Mutex& removed);
  void before_fork();
  void after_fork();
  void after_fork_in_child();
};

namespace {

constinit MutexList all_mutexes;

}  // namespace

void MutexList::add(Mutex& added) {
  const std::lock_guard lock(mutex);
  if (!watches_forks) {
    const int failed =
        pthread_atfork([] { all_mutexes.before_fork(); }, [] { all_mutexes.after_fork(); },
                       [] { all_mutexes.after_fork_in_child(); });
    if (failed != 0) throw std::bad_alloc();
    watches_forks = true;
  }
  added.next_ = first;
  if (first != nullptr) first->previous_ = &added;
  first = &added;
}

void MutexList::remove(const Mutex& removed) {
  const std::lock_guard lock(mutex);
  (removed.previous_ == nullptr ? first : removed.previous_->next_) = removed.next_;
  if (removed.next_ != nullptr) removed.next_->previous_ = removed.previous_;
}

void MutexList::before_fork() {
  mutex.lock();
  for (Mutex* m = first; m != nullptr; m = m->next_) {
    if (m->at_fork_ == AtFork::kTaken) m->lock();
  }
}

void MutexList::after_fork() {
  for (Mutex* m = first; m != nullptr; m = m->next_) {
    if (m->at_fork_ == AtFork::kTaken) m->unlock();
  }
  mutex.unlock();
}

void MutexList::after_fork_in_child() {
  const std::thread::id self = std::this_thread::get_id();
  for (Mutex* m = first; m != nullptr; m = m->next_) {
    const std::thread::id owner = m->owner_.load(std::memory_order_relaxed);
    if (owner == self) continue;
    // Another thread may have held the mutex or waited for it at the fork. That thread does not
    // exist in the child, so the child constructs the mutex again.
    ::new (&m->mutex_) std::mutex();
    m->owner_.store(std::thread::id(), std::memory_order_relaxed);
    if (owner != std::thread::id()) ++m->interruptions_;
  }
  after_fork();
}

Mutex::Mutex(AtFork at_fork) : at_fork_(at_fork) { all_mutexes.add(*this); }
Mutex::~Mutex() { all_mutexes.remove(*this); }

}  // namespace te_fl::python
