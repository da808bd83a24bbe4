// After a failure, reports the last collective that each rank has begun.
#include <thread>

#include "comm/state.hpp"

namespace te_fl::comm {
namespace {

using std::chrono::milliseconds;

// The time that other ranks have to report their last collective. A rank that sees the failure
// reports at once; a rank that hangs or has ended never does.
constexpr milliseconds kPatience{400};
constexpr int kMaxListed = 16;  // ranks listed in a message

std::string last_key(const Comm::State& state, int rank) {
  return state.face->key("last/" + std::to_string(rank));
}

}  // namespace

void publish_last(Comm::State& state) {
  if (state.c.size == 1) return;
  std::string last;
  {
    const std::lock_guard lock(state.mutex);
    last = state.last.op == nullptr ? "no collective" : state.last.text();
  }
  // Ignores an error, since arrivals() reports a store that does not answer.
  (void)state.face->store().set(last_key(state, state.c.rank), last);
}

std::string arrivals(Comm::State& state) {
  if (state.c.size == 1) return {};
  Store& store = state.face->store();
  const Clock::time_point end = Clock::now() + kPatience;
  std::string text, silent;
  int shown = 0;
  for (int r = 0; r < state.c.size; ++r) {
    std::optional<std::string> answer;
    do {
      const Result<std::optional<std::string>> now = store.look(last_key(state, r));
      if (!now.ok())
        return "the store does not answer (rank 0 may be gone): " + now.status().message();
      answer = *now;
      if (!answer) std::this_thread::sleep_for(milliseconds(5));
    } while (!answer && Clock::now() < end);
    if (const int process = answer ? 0 : find_ended_process(state, r); process != 0) {
      text += (text.empty() ? "" : "; ") + ("rank " + std::to_string(r)) +
              " has ended (its process " + std::to_string(process) + " is gone)";
    } else if (!answer) {
      silent += (silent.empty() ? "" : ", ") + std::to_string(r);
    } else if (++shown <= kMaxListed) {
      text += (text.empty() ? "" : "; ") + ("rank " + std::to_string(r)) + " had begun " + *answer;
    }
  }
  if (silent.empty()) return text;
  return text + (text.empty() ? "" : "; ") + "no report from rank " + silent;
}

}  // namespace te_fl::comm
