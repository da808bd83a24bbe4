#include "core/base/fork.hpp"

#include <pthread.h>

namespace te_fl::core {
namespace {

// Lists sorted by lock level. One thread fills them during static initialisation.
constinit ForkMutex* first = nullptr;
constinit ForkedChild* first_repair = nullptr;

}  // namespace

void ForkMutex::watch_forks() {
  if (first == nullptr && first_repair == nullptr)
    pthread_atfork(&before_fork, &after_fork, &after_fork_in_child);
}

ForkMutex::Registration::Registration(ForkMutex& mutex) {
  watch_forks();
  ForkMutex** link = &first;
  while (*link != nullptr && (*link)->mutex_.rank() < mutex.mutex_.rank()) link = &(*link)->next_;
  mutex.next_ = *link;
  *link = &mutex;
}

ForkedChild::ForkedChild(LockLevel level, void (*repair)()) noexcept
    : level_(level), repair_(repair) {
  ForkMutex::watch_forks();
  ForkedChild** link = &first_repair;
  while (*link != nullptr && (*link)->level_ <= level_) link = &(*link)->next_;
  next_ = *link;
  *link = this;
}

void ForkMutex::before_fork() {
  for (ForkMutex* m = first; m != nullptr; m = m->next_) m->lock();
}

void ForkMutex::after_fork() {
  for (ForkMutex* m = first; m != nullptr; m = m->next_) m->unlock();
}

void ForkMutex::after_fork_in_child() {
  after_fork();
  for (const ForkedChild* c = first_repair; c != nullptr; c = c->next_) c->repair_();
}

}  // namespace te_fl::core
