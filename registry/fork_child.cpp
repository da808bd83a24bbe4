#include "registry/fork_child.hpp"

#include <pthread.h>

#include "registry/thread_record.hpp"

namespace te_fl::registry {
namespace {

void child() {
  forget_other_threads();
  registries_after_fork_in_child();
  managers_after_fork_in_child();
  trace_after_fork_in_child();
}

}  // namespace

void install_fork_child() {
  // Handlers of a child run in the order of installation: after ForkMutex's, which are installed
  // when the library is loaded.
  static const int installed = pthread_atfork(nullptr, nullptr, &child);
  static_cast<void>(installed);
}

}  // namespace te_fl::registry
