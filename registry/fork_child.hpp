#pragma once

namespace te_fl::registry {

// Makes a forked child's dispatch whole again (core::g_forked_child). Locks of the process are
// core::ForkMutex's, which fork() takes; this handles what belonged to threads that are gone.
void after_fork_in_child();

// The parts, one per file that owns the state.
void registries_after_fork_in_child();
void managers_after_fork_in_child();
void instance_after_fork_in_child();
void trace_after_fork_in_child() noexcept;

}  // namespace te_fl::registry
