#include "core/base/process_end.hpp"

#include <cxxabi.h>
#include <unistd.h>

#include <string>
#include <thread>

#include "core/base/fork.hpp"

namespace te_fl::core {

constinit std::atomic<int> g_ending_thread{0};

namespace {

using std::chrono::milliseconds;

// Time limits of the waits at process end. kLoads is longer than the time limit of a plugin's
// create(), which is 10 s by default. kCalls is short, since a call may be waiting for work of the
// exiting thread and then cannot end.
constexpr milliseconds kLoads{12000}, kCalls{2000}, kThreadEnd{2000}, kMainExits{100};

constinit std::atomic<bool> g_main_ended{false};

bool is_main() noexcept { return gettid() == getpid(); }

void wait(const std::atomic<void (*)(EndClock::time_point) noexcept>& how,
          milliseconds limit) noexcept {
  if (const auto f = how.load(std::memory_order_acquire); f != nullptr) f(EndClock::now() + limit);
}

// The address that identifies our exit() handler to the C library. Removing the handler also runs
// it; g_taking_back holds the id of the thread that is removing it, so that the handler can return
// at once.
char g_handler_owner = 0;
constinit std::atomic<int> g_taking_back{0};

void before_exit(void*) noexcept {
  if (g_taking_back.load() == gettid()) return;
  int none = 0;
  if (!g_ending_thread.compare_exchange_strong(none, gettid())) return;  // already waited
  wait(g_wait_for_loads, kLoads);
  wait(g_wait_for_calls, kCalls);
}

// Run in a forked child, which has no other threads of the parent. If the parent had begun to exit,
// the child continues to exit.
void in_child() {
  if (g_ending_thread.load() != 0) g_ending_thread.store(gettid());
  g_main_ended.store(false);
  g_taking_back.store(0);
}
const ForkedChild child(LockLevel::kBuiltins, &in_child);

// The end of any thread waits for plugin loads of other threads, since it cannot be
// distinguished from an exit().
struct ThreadEnd {
  bool watched = false;
  ~ThreadEnd() {
    if (!watched) return;
    const bool main = is_main();
    wait(g_wait_for_loads, main ? kLoads : kThreadEnd);
    if (main) g_main_ended.store(true);
  }
};
thread_local ThreadEnd t_end;
// Also runs when te-fl's library is unloaded before the process ends, since the handler's code is
// unloaded with it.
[[gnu::destructor]] void take_handler_back() noexcept {
  g_taking_back.store(gettid());
  (void)abi::__cxa_finalize(&g_handler_owner);
  g_taking_back.store(0);
}

// Watches the thread that loads te-fl, mostly the main thread: it may call exit() without ever
// using te-fl.
[[maybe_unused]] const bool loader_watched = (watch_thread_end(), true);

}  // namespace

void watch_thread_end() noexcept { t_end.watched = true; }

void watch_exit() noexcept {
  // Removes the old handler first, so that the C library has room for the new one. An exit()
  // between the two calls still waits for this load, when its thread ends (ThreadEnd).
  take_handler_back();
  (void)abi::__cxa_atexit(&before_exit, nullptr, &g_handler_owner);
}

void wait_for_main_to_exit() noexcept {
  if (!g_main_ended.exchange(false)) return;
  const auto end = EndClock::now() + kMainExits;
  while (g_ending_thread.load() == 0 && EndClock::now() < end)
    std::this_thread::sleep_for(milliseconds(1));
}

bool ending_on_another_thread() noexcept {
  const int ending = g_ending_thread.load(std::memory_order_seq_cst);
  return ending != 0 && ending != gettid();
}

Status process_ends(const char* what) {
  return failed_precondition(std::string(what) +
                             ": another thread has called exit(), and the process is ending; end "
                             "the threads that use te-fl before it to have all of their results")
      .set_clean();
}

}  // namespace te_fl::core
