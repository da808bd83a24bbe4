#include "comm/watchdog.hpp"

#include <exception>
#include <new>
#include <system_error>
#include <thread>
#include <utility>

#include "comm/state.hpp"
#include "core/base/error_text.hpp"
#include "core/base/fork.hpp"
#include "core/base/process_end.hpp"
#include "registry/thread_record.hpp"
#include "te_fl/log.hpp"

namespace te_fl::comm {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kPeriod{50};
// The time by which the watchdog exceeds a communicator's timeout. Providers for host memory apply
// the timeout themselves and have a better error text; the watchdog is for providers that do not.
constexpr milliseconds kAfterTimeout{400};
constexpr milliseconds kQuestionPeriod{500};

constinit core::ForkMutex watchdog_mutex(core::LockLevel::kCommWatchdog);
const core::ForkMutex::Registration watchdog_registration(watchdog_mutex);
bool g_runs = false;  // guarded by the mutex

// In a forked child the watchdog does not run until the child makes a communicator.
const core::ForkedChild watchdog_child(core::LockLevel::kCommWatchdog, [] { g_runs = false; });

std::string late(const Comm::State& state, const Step& step) {
  return "communicator '" + state.name + "', rank " + std::to_string(state.c.rank) + " of " +
         std::to_string(state.c.size) + ": " + step.text() + " did not end within " +
         std::to_string(state.timeout.count()) + " ms (TE_FL_COMM_TIMEOUT_MS)";
}

// The error that the provider found outside of its calls; empty if there is none.
std::string provider_error(Comm::State& state) {
  if (state.provider->api.async_error == nullptr) return {};
  core::ErrorText errors;
  const te_fl_status code =
      errors.call([&] { return state.provider->api.async_error(state.c.self, errors.sink()); });
  if (code == TE_FL_OK) return {};
  return errors.text().empty() ? "it failed" : errors.text();
}

// Checks a communicator: returns its failure, or OK. Sets `waits_since` to the start of the oldest
// collective that has not ended, or to time_point() if all have ended.
Status look(Comm::State& state, Clock::time_point& waits_since) {
  const std::string error = provider_error(state);
  const std::lock_guard lock(state.mutex);
  const Clock::time_point since{Clock::duration(state.since.load(std::memory_order_acquire))};
  if (!error.empty()) {
    const std::string who =
        "communicator '" + state.name + "', rank " + std::to_string(state.c.rank);
    if (since == Clock::time_point()) return Status(StatusCode::kCommFailed, who + ": " + error);
    // The pending call returns the same error, but possibly later.
    return Status(
        StatusCode::kCommFailed,
        who + " of " + std::to_string(state.c.size) + ": " + state.newest_step().text() + " failed",
        Status(StatusCode::kCommFailed, error));
  }
  if (since != Clock::time_point() && Clock::now() - since > state.timeout + kAfterTimeout)
    return Status(StatusCode::kCommFailed, late(state, state.newest_step()));
  while (state.oldest.set) {
    const Result<bool> done = state.oldest.event.done();
    if (!done.ok() || !*done) break;
    state.oldest.set = false;
    if (state.newest.set) std::swap(state.oldest, state.newest);
  }
  waits_since = since == Clock::time_point() && state.oldest.set ? state.oldest.since : since;
  if (!state.oldest.set || Clock::now() - state.oldest.since <= state.timeout) return {};
  return Status(StatusCode::kCommFailed, late(state, state.oldest.step));
}

// Checks whether another rank has aborted the communicator. Queries the store every half second
// while a collective has been waiting for at least that long, since a provider need not detect an
// abort by another rank.
Status ask_for_abort(Comm::State& state, Clock::time_point waits_since) {
  const Clock::time_point now = Clock::now();
  if (now < state.next_question) return {};
  if (waits_since == Clock::time_point() || now - waits_since < kQuestionPeriod) return {};
  const Result<std::string> abort_text = read_abort(state);
  // A store that failed once is not queried again.
  state.next_question = abort_text.ok() ? Clock::now() + kQuestionPeriod : Clock::time_point::max();
  if (!abort_text.ok() || abort_text->empty()) return {};
  return Status(StatusCode::kCommFailed, "communicator '" + state.name + "', rank " +
                                             std::to_string(state.c.rank) + " of " +
                                             std::to_string(state.c.size) + ": " + *abort_text);
}

// Called when there is no communicator any more. Returns true if a communicator was made meanwhile
// by a thread that found the watchdog running and therefore did not start it.
bool keeps_running() {
  std::vector<std::shared_ptr<Comm::State>> states;  // declared first, so freed after the unlock
  const std::lock_guard lock(watchdog_mutex);
  states = all();
  return g_runs = !states.empty();
}

// Checks one communicator. An exception, for lack of memory or from a program's own store, only
// skips this check.
void watch_one(const std::shared_ptr<Comm::State>& state) try {
  if (state->failed.load(std::memory_order_acquire)) return;
  Status why;
  Clock::time_point waits_since;
  {
    const registry::EpochGuard inside(registry::this_thread().slot);  // exit() waits for it
    if (core::ends_elsewhere()) return;
    const std::lock_guard lock(state->life);
    if (!state->closed) why = look(*state, waits_since);
  }
  if (why.ok()) why = ask_for_abort(*state, waits_since);
  if (!why.ok()) fail_all(state, std::move(why));
} catch (const std::exception& e) {
  log::once(log::Level::kWarning, "watchdog " + state->name,
            "communicator '" + state->name + "' could not be watched: " + e.what());
}

// Checks all communicators. False if there are none any more.
bool watch_all(uint64_t generation) {
  const std::vector<std::shared_ptr<Comm::State>> states = all();
  if (fork_generation() != generation || (states.empty() && !keeps_running())) return false;
  for (const auto& state : states) watch_one(state);
  return !core::ends_elsewhere();
}

void run() noexcept {
  const uint64_t generation = fork_generation();
  for (;;) {
    try {
      if (!watch_all(generation)) return;
    } catch (const std::bad_alloc&) {  // no memory for the list: try again at the next check
    }
    std::this_thread::sleep_for(kPeriod);
  }
}

}  // namespace

Status watch() {
  const std::lock_guard lock(watchdog_mutex);
  if (g_runs) return {};
  try {
    std::thread(run).detach();
  } catch (const std::system_error& e) {
    return Status(StatusCode::kOutOfMemory,
                  std::string("the thread that watches communicators cannot be made: ") + e.what() +
                      "; the limit of the user's processes and threads is reached (ulimit -u, "
                      "pids.max of the control group)");
  }
  g_runs = true;
  return {};
}

}  // namespace te_fl::comm
