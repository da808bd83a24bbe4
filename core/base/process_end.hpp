#pragma once

#include <atomic>
#include <chrono>

#include "te_fl/status.hpp"

// Handling of exit(). exit() destroys static objects of plugins and of their libraries while other
// threads still run. te-fl therefore waits until those threads have left plugin code, and keeps
// them out afterwards. te_fl/te_fl.hpp documents the rule.
namespace te_fl::core {

using EndClock = std::chrono::steady_clock;

// Wait functions that upper layers install. The first waits until no other thread loads or
// deactivates a plugin; the second waits until no other thread is inside an op or a device
// function. Both return at `end` at the latest.
inline constinit std::atomic<void (*)(EndClock::time_point end) noexcept> g_wait_for_loads{nullptr};
inline constinit std::atomic<void (*)(EndClock::time_point end) noexcept> g_wait_for_calls{nullptr};

// Each thread that uses te-fl calls this once. exit() destroys the thread-local objects of its
// thread before any static object, so their destructor waits for plugin loads that are in progress.
void watch_thread_end() noexcept;
// Moves te-fl's exit() handler to the front. Call it after each plugin load, from one thread at a
// time: exit() runs handlers from the newest to the oldest, so the plugin's static objects are
// destroyed after the handler has waited.
void watch_exit() noexcept;
// Call this before a load begins. If the main thread has just ended, exit() may be about to run;
// waits up to 100 ms for it.
void wait_for_main_to_exit() noexcept;

extern std::atomic<int> g_ending_thread;
// True if another thread is ending the process; the caller must then not enter a plugin. A thread
// marks itself as inside before it calls this, so that the exiting thread either waits for it or is
// seen here.
bool ending_on_another_thread() noexcept;
[[gnu::always_inline]] inline bool ends_elsewhere() noexcept {
  return g_ending_thread.load(std::memory_order_relaxed) != 0 && ending_on_another_thread();
}
// The error FAILED_PRECONDITION, marked clean, for a call during exit().
Status process_ends(const char* what);

}  // namespace te_fl::core
