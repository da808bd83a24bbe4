#include "te_fl/op_registry.hpp"
#include "registry/plan_cache.hpp"

#include <pthread.h>

#include <algorithm>
#include <iterator>
#include <mutex>
#include <thread>

#include "core/base/best_effort.hpp"
#include "core/base/fork.hpp"
#include "core/base/living_objects.hpp"
#include "core/base/settings.hpp"
#include "core/device/device_list.hpp"
#include "policy/current.hpp"
#include "registry/registration.hpp"
#include "registry/registry_impl.hpp"
#include "registry/thread_record.hpp"

namespace te_fl {
namespace {

using registry::Implementation;
using registry::OpRow;
using registry::Table;

// Guards the tables of all registries and the list of registries. No plugin or device function is
// called while it is held, so it is held for a short time only.
constinit core::ForkMutex mutex(core::LockLevel::kRegistry);
const core::ForkMutex::Registration registration(mutex);

using Registries = core::LivingObjects<OpRegistry::Impl, mutex>;
using AllRegistries = Registries::All;

std::atomic<uint64_t> g_table_ids{1};

// Threads move tables and implementations out under the lock, to destroy them after it is released.
// g_holders counts these threads and t_holding the calling thread's share. g_holders_gone is set in
// a forked child if other threads of the parent held objects at the fork; those references are
// never released. The lock guards g_holders and g_holders_gone.
int g_holders = 0;
constinit thread_local int t_holding = 0;
bool g_holders_gone = false;

// Counts the thread in g_holders. Declare it before the containers of the objects, so that it is
// destroyed after them.
class Holding {
 public:
  Holding() { count(1); }
  ~Holding() { count(-1); }
  Holding(const Holding&) = delete;
  Holding& operator=(const Holding&) = delete;

 private:
  static void count(int change) {
    std::lock_guard lock(mutex);
    g_holders += change;
    t_holding += change;
  }
};

Status busy() {
  return Status(StatusCode::kBusy,
                "an implementation cannot be removed from inside an op or a function of a device: "
                "this thread "
                "would wait for itself; remove it after the call returned");
}

void after_fork_in_child() {
  Registries::after_fork_in_child();
  g_holders_gone = g_holders_gone || g_holders != t_holding;
  g_holders = t_holding;
  for (OpRegistry::Impl* impl : Registries::list()) impl->after_fork_in_child();
}
const core::ForkedChild forked_child(core::LockLevel::kRegistry, &after_fork_in_child);

// ---- handling of changes of a device (core::g_device_hooks)

void device_added(const Device& device) {
  core::find_device_again(device);
  for (OpRegistry::Impl* r : AllRegistries()) r->restore(device);
}

void device_lost(const Device& device, const std::string& reason) {
  const Status why = core::lost_device(device, reason);
  for (OpRegistry::Impl* r : AllRegistries()) r->bar(device, why);
}

void device_barred(const Device& device) {
  const Status why = core::withdrawn_device(device);
  for (OpRegistry::Impl* r : AllRegistries()) r->bar(device, why);
}

Status check_leave(const Device& device) {
  return registry::check_captures(
      [&](const registry::Plan& plan) { return plan.device == device; });
}

void device_left(const Device& device) {
  for (OpRegistry::Impl* r : AllRegistries()) r->drop_plans(device);
}

}  // namespace

namespace registry {

void choose_again() {
  const Holding holding;
  std::vector<std::unique_ptr<const Table>> dead;  // destroyed after the lock, as in reclaim()
  std::lock_guard lock(mutex);
  for (OpRegistry::Impl* impl : Registries::list()) impl->publish_again(dead);
}

}  // namespace registry

OpRegistry::Impl::Impl() {
  auto first = std::make_unique<Table>();
  registry::add_catalogue(*first);
  std::lock_guard lock(mutex);
  Registries::list().push_back(this);
  first->id = g_table_ids.fetch_add(1);
  current_.store(first.release(), std::memory_order_release);
  core::g_device_hooks.on_added.store(&device_added, std::memory_order_release);
  core::g_device_hooks.on_lost.store(&device_lost, std::memory_order_release);
  core::g_device_hooks.on_barred.store(&device_barred, std::memory_order_release);
  core::g_device_hooks.on_launching.store(&registry::note_launch, std::memory_order_release);
  core::g_device_hooks.check_removal.store(&check_leave, std::memory_order_release);
  core::g_device_hooks.on_removed.store(&device_left, std::memory_order_release);
}

OpRegistry::Impl::~Impl() {
  Registries::remove(this);
  // The owner ensures that no call of this registry is in progress, so its tables are freed without
  // waiting for calls in other registries.
  retired_.clear();
  delete current_.load(std::memory_order_acquire);
}

std::unique_ptr<Table> OpRegistry::Impl::copy_table() const {
  return std::make_unique<Table>(*current_.load(std::memory_order_relaxed));
}

void OpRegistry::Impl::publish(std::unique_ptr<Table> next) {
  retired_.emplace_back();  // may throw; nothing was changed before
  next->id = g_table_ids.fetch_add(1);
  const Table* old = current_.exchange(next.release(), std::memory_order_seq_cst);
  retired_.back() = {std::unique_ptr<const Table>(old), registry::retire()};
}

void OpRegistry::Impl::publish_again(std::vector<std::unique_ptr<const Table>>& dead) {
  publish(copy_table());
  take_dead(registry::oldest_inside(), dead);
}

void OpRegistry::Impl::take_dead(uint64_t oldest, std::vector<std::unique_ptr<const Table>>& dead) {
  while (!retired_.empty() && retired_.front().epoch < oldest) {
    dead.push_back(std::move(retired_.front().table));
    retired_.pop_front();
  }
}

void OpRegistry::Impl::reclaim() noexcept {
  core::best_effort([this] {  // if there is no memory, the next change reclaims
    const uint64_t oldest = registry::oldest_inside();
    const Holding holding;
    std::vector<std::unique_ptr<const Table>>
        dead;  // destroying their implementations may call a plugin
    std::lock_guard lock(mutex);
    take_dead(oldest, dead);
  });
}

Status OpRegistry::Impl::add(std::span<const te_fl_op_desc* const> descs, const std::string& owner,
                             const std::string& vendor, const std::shared_ptr<void>& keep_alive) {
  const Holding holding;
  std::vector<std::shared_ptr<Implementation>> made;
  for (const te_fl_op_desc* desc : descs) {
    TE_FL_ASSIGN_OR_RETURN(auto impl,
                           registry::make_implementation(desc, owner, vendor, keep_alive));
    made.push_back(std::move(impl));
  }
  std::unique_ptr<Table>
      next;                    // destroyed after the lock is released, since that may call a plugin
  core::ensure_environment();  // takes kEnvironment, which precedes kRegistry
  {
    std::lock_guard lock(mutex);
    next = copy_table();
    for (std::shared_ptr<Implementation>& impl : made) {
      TE_FL_RETURN_IF_ERROR(registry::add_implementation(*next, std::move(impl)));
    }
    publish(std::move(next));
  }
  reclaim();
  return {};
}

Result<OpId> OpRegistry::Impl::declare(const te_fl_op_schema& schema) {
  Result<uint32_t> row = internal_error("");
  {
    std::lock_guard lock(mutex);
    std::unique_ptr<Table> next = copy_table();
    const size_t before = next->ops.size();
    row = registry::add_op(*next, schema, registry::Naming::kAny);
    if (!row.ok()) return row.status();
    if (next->ops.size() != before) publish(std::move(next));
  }
  policy::know_op(schema.name);
  reclaim();
  return OpId{*row};
}

Status OpRegistry::Impl::set_priority(std::string_view op, std::string_view impl_id,
                                      int32_t priority) {
  {
    std::lock_guard lock(mutex);
    std::unique_ptr<Table> next = copy_table();
    TE_FL_RETURN_IF_ERROR(registry::change_priority(*next, op, impl_id, priority));
    publish(std::move(next));
  }
  reclaim();
  return {};
}

bool OpRegistry::Impl::held_by_none_here(const Implementation& impl) const {
  std::lock_guard lock(mutex);
  if (!g_holders_gone || g_holders != t_holding) return false;
  return std::none_of(retired_.begin(), retired_.end(), [&](const Retired& retired) {
    return registry::lists(*retired.table, impl);
  });
}

Status OpRegistry::Impl::check_removal(const Match& match) const {
  if (registry::inside_op()) return busy();
  const registry::EpochGuard guard(registry::this_thread().slot);
  std::vector<const Implementation*> picked;
  for (const auto& row : table().ops) {
    if (row == nullptr) continue;
    for (const auto& impl : row->impls) {
      if (impl->plan_memory && match(*impl)) picked.push_back(impl.get());
    }
  }
  if (picked.empty()) return {};
  return registry::check_captures([&](const registry::Plan& plan) {
    return std::find(picked.begin(), picked.end(), plan.impl) != picked.end();
  });
}

size_t OpRegistry::Impl::remove(const Match& match) {
  std::vector<std::shared_ptr<Implementation>> removed;
  {
    std::lock_guard lock(mutex);
    std::unique_ptr<Table> next = copy_table();
    removed = registry::remove_implementations(*next, match);
    if (!removed.empty()) publish(std::move(next));
  }
  // Waits even if nothing was removed: a device of the caller may be in use by ops of other owners.
  registry::wait_quiescent(registry::retire());
  // One pass is usually enough. Two cases need more: a thread that published an old epoch after our
  // change keeps the retired tables alive until it leaves, and another thread's reclaim() may be
  // destroying the tables right now. No new references can appear.
  reclaim();
  for (const auto& impl : removed) {
    while (impl.use_count() != 1 && !held_by_none_here(*impl)) {
      std::this_thread::yield();
      reclaim();
    }
  }
  return removed.size();
}

void OpRegistry::Impl::bar(const Device& device, const Status& why) {
  {
    std::lock_guard lock(mutex);
    std::unique_ptr<Table> next = copy_table();
    if (next->barred_device(device) != nullptr) return;
    next->barred.push_back({device, why});
    publish(std::move(next));
  }
  reclaim();
}

void OpRegistry::Impl::drop_plans(const Device& device) {
  const Holding holding;
  std::vector<std::shared_ptr<Implementation>> owners;  // must outlive their plans
  std::vector<std::unique_ptr<registry::Plan>> plans;
  {
    const registry::EpochGuard guard(registry::this_thread().slot);
    for (const auto& row : table().ops) {
      if (row == nullptr) continue;
      for (const auto& impl : row->impls) {
        if (impl->plans == nullptr) continue;
        auto taken = impl->plans->take(device);
        if (!taken.empty()) owners.push_back(impl);
        std::move(taken.begin(), taken.end(), std::back_inserter(plans));
      }
    }
  }
  // Another thread may still be comparing the key of its call with the key of a removed plan.
  if (!plans.empty()) registry::wait_quiescent(registry::retire());
}

void OpRegistry::Impl::restore(const Device& device) {
  {
    std::lock_guard lock(mutex);
    std::erase_if(archs_, [&](const auto& entry) { return entry.first == device; });
    std::unique_ptr<Table> next = copy_table();
    std::erase_if(next->barred, [&](const auto& b) { return b.device == device; });
    publish(std::move(next));  // also if it was not barred, since routes depend on the architecture
  }
  reclaim();
}

Result<uint32_t> OpRegistry::Impl::arch(const Device& device) {
  if (device.is_host()) return uint32_t{0};
  {
    std::lock_guard lock(mutex);
    for (const auto& [known, arch] : archs_) {
      if (known == device) return arch;
    }
  }
  TE_FL_ASSIGN_OR_RETURN(const te_fl_device_props props, devices::properties(device));
  std::lock_guard lock(mutex);
  archs_.emplace_back(device, props.arch);
  return props.arch;
}

void OpRegistry::Impl::after_fork_in_child() noexcept {
  const auto reset = [](const Table& table) {
    for (const auto& row : table.ops) {
      if (row == nullptr) continue;
      for (const auto& impl : row->impls) impl->serial.reset_after_fork(registry::t_record);
    }
  };
  reset(*current_.load(std::memory_order_relaxed));
  for (const Retired& r : retired_) reset(*r.table);
}

// ---- public functions

OpRegistry::OpRegistry() : impl_(std::make_unique<Impl>()) {}
OpRegistry::~OpRegistry() = default;

OpRegistry& OpRegistry::instance() {
  // Never freed: threads may run after static destruction.
  static constinit std::atomic<OpRegistry*> instance{nullptr};
  return core::made_once(instance, [] { return new OpRegistry; });
}

Status OpRegistry::register_op(const te_fl_op_desc& desc, std::string owner, std::string vendor,
                               std::shared_ptr<void> keep_alive) {
  const te_fl_op_desc* const one[] = {&desc};
  return impl_->add(one, owner, vendor, keep_alive);
}

Status OpRegistry::register_ops(std::span<const te_fl_op_desc* const> descs, std::string owner,
                                std::string vendor, std::shared_ptr<void> keep_alive) {
  return impl_->add(descs, owner, vendor, keep_alive);
}

Status OpRegistry::unregister_op(std::string_view op, std::string_view impl_id) {
  const auto is_it = [&](const Implementation& i) { return i.op == op && i.impl_id == impl_id; };
  TE_FL_RETURN_IF_ERROR(impl_->check_removal(is_it));
  if (impl_->remove(is_it) != 0) return {};
  return not_found("there is no implementation '" + std::string(impl_id) + "' of op '" +
                   std::string(op) + "' to unregister");
}

Status OpRegistry::unregister_owner(std::string_view owner) {
  const auto is_owners = [&](const Implementation& i) { return i.owner == owner; };
  TE_FL_RETURN_IF_ERROR(impl_->check_removal(is_owners));
  impl_->remove(is_owners);
  return {};
}

Status OpRegistry::set_priority(std::string_view op, std::string_view impl_id, int32_t priority) {
  return impl_->set_priority(op, impl_id, priority);
}

namespace {

// Calls f with the current table. The guard keeps the table alive during the call.
template <class F>
auto with_table(const OpRegistry::Impl& impl, F&& f) {
  const registry::EpochGuard guard(registry::this_thread().slot);
  return f(impl.table());
}

}  // namespace

std::vector<OpImplInfo> OpRegistry::snapshot() const {
  return with_table(*impl_, [](const Table& table) {
    std::vector<OpImplInfo> list;
    for (const auto& row : table.ops) {
      if (row == nullptr) continue;
      for (size_t i = 0; i < row->impls.size(); ++i) {
        const Implementation& impl = *row->impls[i];
        OpImplInfo info{impl.op,    impl.impl_id, impl.kind, impl.vendor, row->views[i].priority,
                        impl.owner, impl.desc};
        info.desc.priority = info.priority;
        list.push_back(std::move(info));
      }
    }
    return list;
  });
}

std::vector<std::string> OpRegistry::op_names() const {
  return with_table(*impl_, [](const Table& table) { return registry::op_names(table); });
}

Result<OpId> OpRegistry::find(std::string_view op) const {
  return with_table(*impl_, [&](const Table& table) -> Result<OpId> {
    TE_FL_ASSIGN_OR_RETURN(const uint32_t index, registry::find_op(table, op));
    return OpId{index};
  });
}

const te_fl_op_schema* OpRegistry::schema(OpId op) const {
  // Rows are never removed, and later tables share the compiled op, so the pointer stays valid.
  return with_table(*impl_, [&](const Table& table) -> const te_fl_op_schema* {
    const registry::OpRow* row = table.row(op.index);
    return row == nullptr ? nullptr : &row->compiled->schema();
  });
}

Result<OpId> OpRegistry::declare_op(const te_fl_op_schema& schema) {
  return impl_->declare(schema);
}

uint64_t OpRegistry::epoch() const noexcept {
  const registry::EpochGuard guard(registry::this_thread().slot);
  return impl_->table().id;
}

}  // namespace te_fl
