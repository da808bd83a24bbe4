#include "core/base/fork.hpp"

#include <pthread.h>

// Levels: 10 environment, 20 device list, 25 streams, 27 allocations, 35 policies, 40 registry, 50
// dispatch threads, 60 plans, 65 interned strings, 70 workspaces, 72 staging buffers, 74 waiting
// plugins, 75 managers, 77 quarantine, 78 checks of calls, 79 trace, 85 provider names, 90 log.
namespace te_fl::core {

constinit std::atomic<void (*)()> g_forked_child{nullptr};

namespace {

// Sorted by level. Filled while the library's static objects are made, by one thread.
constinit ForkMutex* first = nullptr;

}  // namespace

ForkMutex::Registration::Registration(ForkMutex& mutex) {
  if (first == nullptr) pthread_atfork(&before_fork, &after_fork, &after_fork_in_child);
  ForkMutex** link = &first;
  while (*link != nullptr && (*link)->level_ <= mutex.level_) link = &(*link)->next_;
  mutex.next_ = *link;
  *link = &mutex;
}

void ForkMutex::before_fork() {
  for (ForkMutex* m = first; m != nullptr; m = m->next_) m->lock();
}

void ForkMutex::after_fork() {
  for (ForkMutex* m = first; m != nullptr; m = m->next_) m->unlock();
}

void ForkMutex::after_fork_in_child() {
  after_fork();
  if (auto* then = g_forked_child.load(std::memory_order_acquire)) then();
}

}  // namespace te_fl::core
