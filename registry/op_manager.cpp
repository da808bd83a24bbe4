#include "te_fl/op_manager.hpp"

#include <algorithm>
#include <mutex>

#include "core/fork.hpp"
#include "plugins/hooks.hpp"
#include "policy/current.hpp"
#include "registry/fork_child.hpp"
#include "registry/manager_impl.hpp"

namespace te_fl {
namespace {

using registry::Call;
using registry::Choice;
using registry::EpochGuard;
using registry::Implementation;
using registry::OpRow;
using registry::RouteEntry;
using registry::RouteKey;
using registry::Table;
using registry::ThreadRecord;
using registry::this_thread;

// Guards the list of managers and their usage bases.
constinit core::ForkMutex mutex(75);
const core::ForkMutex::Registration registration(mutex);

std::vector<OpManager::Impl*>& managers() {
  static auto* const all = new std::vector<OpManager::Impl*>;
  return *all;
}

std::atomic<uint64_t> g_handles{1};

std::vector<OpManager::Impl*> managers_now() {
  std::lock_guard lock(mutex);
  return managers();
}

void device_added(const Device& device) {
  for (OpManager::Impl* m : managers_now()) m->table_owner.restore(device);
}

void release_device(const Device& device) {
  for (OpManager::Impl* m : managers_now()) m->arenas.release(device);
}

void count(std::atomic<uint64_t>& counter) noexcept {
  // One writer: no read-modify-write instruction is needed.
  counter.store(counter.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
}

// The warm way: run() with a context on the stack, nothing else.
inline Status run_fast(Call& call, const Implementation& impl, std::atomic<uint64_t>& counter, bool& served) {
  core::ErrorText errors;
  const te_fl_context context = registry::context_of(call, false, errors.sink());
  const te_fl_status code = registry::guarded_run(impl, context, call.args, errors);
  served = code == TE_FL_OK;
  if (served) count(counter);
  return served ? Status() : registry::after_first_failed(call, impl, code, errors.text());
}

Status run(Call& call) {
  TE_FL_RETURN_IF_ERROR(registry::prepare_call(call));
  const RouteKey key(call.op, call.signature, call.policy, call.capturing);
  RouteEntry* entry = call.thread.routes.find(call.table.id, key);
  if (entry == nullptr) {
    TE_FL_ASSIGN_OR_RETURN(entry, registry::route_of(call, key));
  }
  return registry::run_route(call, *entry);
}

}  // namespace
}  // namespace te_fl
