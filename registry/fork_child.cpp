#include "registry/fork_child.hpp"

#include "registry/thread_record.hpp"

namespace te_fl::registry {

void after_fork_in_child() {
  forget_other_threads();
  registries_after_fork_in_child();
  managers_after_fork_in_child();
  trace_after_fork_in_child();
}

}  // namespace te_fl::registry
