// Groups of collectives that one thread starts together.
#include <algorithm>
#include <atomic>
#include <thread>

#include "comm/calls.hpp"
#include "comm/state.hpp"
#include "core/base/best_effort.hpp"
#include "core/base/error_text.hpp"
#include "core/base/fork.hpp"
#include "te_fl/log.hpp"

namespace te_fl {
namespace comm {
namespace {

// A collective that was passed to its provider and begins when the group ends.
struct Pending {
  std::shared_ptr<Comm::State> state;
  bool capturing = false;  // captured into a graph: it does not run yet
  void* stream = nullptr;
  Step step;
};
// The open group of one provider on one thread. Groups are kept in one list instead of thread_local
// variables, since a library that is loaded late has little room for static TLS.
struct OpenGroup {
  std::thread::id thread;
  uint64_t process = 0;  // fork_generation(): the parent's groups do not count in a child
  const registry::CommProvider* provider = nullptr;
  int depth = 0;
  std::vector<Pending> pending;
};
std::atomic<std::vector<OpenGroup>*> g_groups{nullptr};
std::atomic<int> g_count{0};

// The caller holds list_mutex().
std::vector<OpenGroup>& groups() {
  return core::made_once(g_groups, [] { return new std::vector<OpenGroup>; });
}

// The calling thread's open group of the provider; null if there is none. The caller holds
// list_mutex().
OpenGroup* open_group(const registry::CommProvider* provider) {
  const auto found = std::find_if(groups().begin(), groups().end(), [&](const OpenGroup& g) {
    return g.provider == provider && g.thread == std::this_thread::get_id() &&
           g.process == fork_generation();
  });
  return found == groups().end() ? nullptr : &*found;
}

void opened(const registry::CommProvider* provider) {
  const std::lock_guard lock(list_mutex());
  OpenGroup* group = open_group(provider);
  if (group == nullptr) {
    group = &groups().emplace_back();
    group->process = fork_generation();
    group->thread = std::this_thread::get_id();
    group->provider = provider;
  }
  ++group->depth;
  g_count.store(static_cast<int>(groups().size()), std::memory_order_relaxed);
}

// Closes a group. Returns the collectives that begin now: all pending ones if this is the outermost
// group, otherwise none.
std::vector<Pending> closed(const registry::CommProvider* provider) {
  const std::lock_guard lock(list_mutex());
  OpenGroup* group = open_group(provider);
  if (--group->depth > 0) return {};
  std::vector<Pending> pending = std::move(group->pending);
  groups().erase(groups().begin() + (group - groups().data()));
  g_count.store(static_cast<int>(groups().size()), std::memory_order_relaxed);
  return pending;
}

// Makes the watchdog treat the collectives of a group like calls in progress while the provider
// begins them.
void set_running_since(const std::vector<Pending>& pending, Clock::rep since) {
  for (const Pending& p : pending) p.state->since.store(since, std::memory_order_release);
}

Status check_thread(const Comm::State& state) {
  const std::lock_guard lock(list_mutex());
  if (open_group(state.provider.get()) != nullptr) return {};
  return failed_precondition(
      "communicator '" + state.name +
      "': a group of collectives ends on a thread that began none; end it on "
      "the thread of CommGroup::begin");
}

// Releases, at the end of end_group(), the communicators of the group's collectives and of the
// group itself.
struct LeavingGroup {
  ~LeavingGroup() {
    for (const Pending& p : pending) p.state->leave();
    state->leave();
  }
  const std::shared_ptr<Comm::State>& state;
  const std::vector<Pending>& pending;
};

// Ends the provider's group. The status is that of its collectives.
Status end_group(const std::shared_ptr<Comm::State>& state) {
  const std::vector<Pending> pending = closed(state->provider.get());
  const Clock::time_point since = Clock::now();
  set_running_since(pending, since.time_since_epoch().count());
  core::ErrorText errors;
  const te_fl_status code = errors.call(
      [&] { return state->provider->api.group_end(state->provider->desc.self, errors.sink()); });
  set_running_since(pending, 0);
  const LeavingGroup leaving{state, pending};
  Status status = errors.status(code, "communicator '" + state->name + "': a group of collectives");
  if (status.ok()) {
    for (const Pending& p : pending)
      if (!p.capturing) mark_enqueued(*p.state, p.stream, p.step, since);
  }
  if (status.code() == StatusCode::kCommFailed) fail_all(state, status);
  return status;
}

}  // namespace

bool wait_for_group(const std::shared_ptr<Comm::State>& state, const core::CollectiveCall& call,
                    const Step& step) {
  if (g_count.load(std::memory_order_relaxed) == 0) return false;
  const std::lock_guard lock(list_mutex());
  OpenGroup* group = open_group(state->provider.get());
  if (group == nullptr) return false;
  group->pending.push_back({state, call.capturing, call.stream, step});
  state->use();  // end_group() releases it
  return true;
}

}  // namespace comm

Result<CommGroup> CommGroup::begin(const Comm& comm) {
  if (!comm) return invalid_argument("CommGroup::begin: the Comm is empty");
  const std::shared_ptr<Comm::State> state = comm::find(comm.c()->id);
  TE_FL_RETURN_IF_ERROR(comm::check_process(*state));
  const te_fl_comm_api& api = state->provider->api;
  if (api.group_start == nullptr) {
    return Status(
        StatusCode::kUnsupported,
        "provider '" + state->provider->name +
            "' of collectives has no groups (te_fl_comm_api.group_start); order sends and "
            "receives so that no two ranks wait for each other");
  }
  core::ErrorText errors;
  const te_fl_status code =
      errors.call([&] { return api.group_start(state->provider->desc.self, errors.sink()); });
  TE_FL_RETURN_IF_ERROR(errors.status(code, "communicator '" + state->name + "': group_start"));
  comm::opened(state->provider.get());
  state->use();
  return CommGroup(state);
}

CommGroup::CommGroup(CommGroup&& other) noexcept : state_(std::move(other.state_)) {}

CommGroup::~CommGroup() {
  if (state_ == nullptr) return;
  core::best_effort([this] {
    if (const Status status = end(); !status.ok()) log::error(status.to_string());
  });
}

Status CommGroup::end() {
  if (state_ == nullptr) return failed_precondition("CommGroup::end: the group has ended");
  TE_FL_RETURN_IF_ERROR(comm::check_thread(*state_));
  return comm::end_group(std::exchange(state_, nullptr));
}

}  // namespace te_fl
