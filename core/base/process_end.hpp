#pragma once

#include <atomic>
#include <chrono>

#include "te_fl/status.hpp"

// The end of the process by exit(), which destroys static objects of plugins and of the libraries
// that they use while the other threads go on. te-fl lets those threads leave plugins first, and
// keeps them out from then on; te_fl/te_fl.hpp has the rule.
namespace te_fl::core {

using EndClock = std::chrono::steady_clock;

// Two ways to wait, which the rooms above set: until no other thread loads or deactivates a plugin,
// and until no other thread is inside an op or a function of a device. Both return at `end` at the
// latest.
inline constinit std::atomic<void (*)(EndClock::time_point end) noexcept> g_wait_for_loads{nullptr};
inline constinit std::atomic<void (*)(EndClock::time_point end) noexcept> g_wait_for_calls{nullptr};

// To be called once by each thread that uses te-fl. exit() destroys the objects of its own thread
// before any static one, so the thread's end waits for a load that goes on then.
void watch_thread_end() noexcept;
// To be called whenever a plugin has been loaded, by one thread at a time: the objects that it made
// are destroyed after the wait, as exit() goes from the newest to the oldest. There is one handler,
// which becomes the newest.
void watch_exit() noexcept;
// To be called before a load begins: where the main thread has just ended, exit() may be about to
// run, and a moment shows it.
void wait_for_main_to_exit() noexcept;

extern std::atomic<int> g_ending_thread;
// True if another thread ends the process: the caller is not to enter a plugin any more. Whoever is
// to be waited for says that it is inside before it asks.
bool ending_on_another_thread() noexcept;
[[gnu::always_inline]] inline bool ends_elsewhere() noexcept {
  return g_ending_thread.load(std::memory_order_relaxed) != 0 && ending_on_another_thread();
}
// FAILED_PRECONDITION, clean.
Status process_ends(const char* what);

}  // namespace te_fl::core
