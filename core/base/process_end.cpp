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

// A create() that hangs is given up after its own limit, which is 10 s unless set; a call may wait
// for what only the thread that exits could do.
constexpr milliseconds kLoads{12000}, kCalls{2000}, kThreadEnd{2000}, kMainExits{100};

constinit std::atomic<bool> g_main_ended{false};

bool is_main() noexcept { return gettid() == getpid(); }

void wait(const std::atomic<void (*)(EndClock::time_point) noexcept>& how,
          milliseconds limit) noexcept {
  if (const auto f = how.load(std::memory_order_acquire); f != nullptr) f(EndClock::now() + limit);
}

// The C library knows the handler of exit() by this address. While a thread takes it back, which
// runs it, the thread's number stands in g_taking_back.
char g_handler_owner = 0;
constinit std::atomic<int> g_taking_back{0};

void before_exit(void*) noexcept {
  if (g_taking_back.load() == gettid()) return;
  int none = 0;
  if (!g_ending_thread.compare_exchange_strong(none, gettid())) return;  // it has waited
  wait(g_wait_for_loads, kLoads);
  wait(g_wait_for_calls, kCalls);
}

// The threads of the parent are not in the child; what it began to destroy, it goes on destroying.
void in_child() {
  if (g_ending_thread.load() != 0) g_ending_thread.store(gettid());
  g_main_ended.store(false);
  g_taking_back.store(0);
}
const ForkedChild child(LockLevel::kBuiltins, &in_child);

// An ordinary end of a thread waits for the loads of others as well, as it looks the same.
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
// Also called where te-fl's library is closed before the process ends, as its code goes then.
[[gnu::destructor]] void take_handler_back() noexcept {
  g_taking_back.store(gettid());
  (void)abi::__cxa_finalize(&g_handler_owner);
  g_taking_back.store(0);
}

// The thread that loads te-fl, mostly the main one, may exit without having used it.
[[maybe_unused]] const bool loader_watched = (watch_thread_end(), true);

}  // namespace

void watch_thread_end() noexcept { t_end.watched = true; }

void watch_exit() noexcept {
  // The old one goes first, so that the C library has room for the new one where it was. An exit()
  // between the two waits for this load all the same, as its thread ends (ThreadEnd).
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
