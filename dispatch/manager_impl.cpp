// The op managers of the process: their device memory, and the counts of executed calls.

#include "dispatch/manager_impl.hpp"

#include <algorithm>
#include <mutex>
#include <tuple>
#include <vector>

#include "core/base/fork.hpp"
#include "core/base/living_objects.hpp"
#include "core/base/text.hpp"
#include "core/device/current_stream.hpp"
#include "core/device/device_list.hpp"
#include "dispatch/crash_report.hpp"
#include "registry/plan_cache.hpp"
#include "te_fl/environment.hpp"

namespace te_fl {
namespace {

using dispatch::EpochGuard;
using dispatch::Implementation;
using dispatch::UsageCounts;
using registry::this_thread;

// Guards the list of managers and their usage_base members.
constinit core::ForkMutex mutex(core::LockLevel::kManagers);
const core::ForkMutex::Registration registration(mutex);

using Managers = core::LivingObjects<OpManager::Impl, mutex>;
using AllManagers = Managers::All;

int64_t held_on(const Device& device) {
  int64_t held = 0;
  for (OpManager::Impl* m : AllManagers()) held += m->arenas.held(device) + m->staging.held(device);
  return held;
}

void release_device(const Device& device) {
  for (OpManager::Impl* m : AllManagers()) {
    m->arenas.release(device);
    m->staging.release(device);
  }
}

void stream_goes(const Device& device, void* stream) {
  registry::leave_stream(device, stream);
  for (OpManager::Impl* m : AllManagers()) m->arenas.release(device, stream);
}

void stream_state_goes(uint64_t implementation) {
  for (OpManager::Impl* m : AllManagers()) m->arenas.release_state(implementation);
}

UsageCounts read_counts(const Implementation& impl) {
  return {registry::read_counter(impl.counter), impl.staged.calls.load(std::memory_order_relaxed),
          impl.staged.bytes.load(std::memory_order_relaxed),
          impl.staged.copying.load(std::memory_order_relaxed),
          impl.staged.waiting.load(std::memory_order_relaxed)};
}

void after_fork_in_child() {
  Managers::after_fork_in_child();
  for (OpManager::Impl* m : Managers::list()) {
    m->arenas.forget_after_fork();
    m->staging.forget_after_fork();
  }
}
const core::ForkedChild forked_child(core::LockLevel::kManagers, &after_fork_in_child);

}  // namespace

OpManager::Impl::Impl(OpRegistry& r) : registry(r), table_owner(r.impl()) {
  std::lock_guard lock(mutex);
  Managers::list().push_back(this);
  core::g_device_hooks.count_cached.store(&held_on, std::memory_order_release);
  core::g_device_hooks.release_cached.store(&release_device, std::memory_order_release);
  core::g_stream_goes.store(&stream_goes, std::memory_order_release);
  registry::g_stream_state_goes.store(&stream_state_goes, std::memory_order_release);
}

OpManager::Impl::~Impl() { Managers::remove(this); }

uint64_t OpManager::Impl::read_switches() {
  const auto on = [](const char* name) {
    const Result<bool> value = environment::get_bool(name);
    return value.ok() && *value;
  };
  const auto is_set = [](const char* name) {
    const Result<std::string> value = environment::get(name);
    return value.ok() && !core::trim(*value).empty();
  };
  (void)on("TE_FL_SYNC");  // reads the environment if necessary
  // Reads the change counter of the environment before the settings: if a setting changes in
  // between, the next call reads the settings again.
  const uint64_t generation = environment::generation();
  const uint64_t switches = (on("TE_FL_SYNC") ? uint64_t{kSync} : 0) |
                            (on("TE_FL_VALIDATE") ? uint64_t{kValidate} : 0) |
                            (is_set("TE_FL_VERIFY") ? uint64_t{kVerify} : 0) |
                            (is_set("TE_FL_TRACE") ? uint64_t{kTrace} : 0);
  dispatch::follow_crash_report_setting();
  switch_word.store(generation << kSwitchBits | switches, std::memory_order_relaxed);
  return switches;
}

std::vector<OpUsage> OpManager::usage() const {
  std::map<uint64_t, UsageCounts> base;
  {
    std::lock_guard lock(mutex);
    base = impl_->usage_base;
  }
  std::vector<OpUsage> list;
  const EpochGuard guard(this_thread().slot);
  for (const auto& row : impl_->table_owner.table().ops) {
    if (row == nullptr) continue;
    for (const auto& impl : row->impls) {
      const UsageCounts before = base[impl->number], now = read_counts(*impl);
      if (now.calls == before.calls) continue;
      OpUsage& use = list.emplace_back(OpUsage{impl->op, impl->impl_id});
      use.calls = now.calls - before.calls;
      use.staged_calls = now.staged_calls - before.staged_calls;
      use.staged_bytes = now.staged_bytes - before.staged_bytes;
      use.staged_microseconds = (now.copying_nanoseconds - before.copying_nanoseconds) / 1000;
      use.staged_wait_microseconds = (now.waiting_nanoseconds - before.waiting_nanoseconds) / 1000;
    }
  }
  std::sort(list.begin(), list.end(), [](const OpUsage& a, const OpUsage& b) {
    if (a.calls != b.calls) return a.calls > b.calls;
    return std::tie(a.op, a.impl_id) < std::tie(b.op, b.impl_id);
  });
  return list;
}

Status OpManager::count(OpId op, std::string_view impl_id) {
  return dispatch::with_call<Status>(*impl_, op, nullptr, {}, [&](dispatch::Call& call) -> Status {
    for (const auto& impl : call.row.impls) {
      if (impl->impl_id != impl_id) continue;
      if (std::atomic<uint64_t>* counter = call.thread.counters.at(impl->counter))
        counter->store(counter->load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
      return {};
    }
    return not_found("op '" + std::string(call.row.compiled->schema().name) +
                     "' has no implementation '" + std::string(impl_id) + "'");
  });
}

void OpManager::reset_usage() {
  std::map<uint64_t, UsageCounts> base;
  {
    const EpochGuard guard(this_thread().slot);
    for (const auto& row : impl_->table_owner.table().ops) {
      if (row == nullptr) continue;
      for (const auto& impl : row->impls) base[impl->number] = read_counts(*impl);
    }
  }
  std::lock_guard lock(mutex);
  impl_->usage_base = std::move(base);
}

}  // namespace te_fl
