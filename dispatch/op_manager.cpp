#include "te_fl/op_manager.hpp"

#include <algorithm>
#include <mutex>
#include <tuple>

#include "core/base/fork.hpp"
#include "core/base/text.hpp"
#include "core/device/current_stream.hpp"
#include "core/device/device_list.hpp"
#include "dispatch/manager_impl.hpp"
#include "dispatch/watch/quarantine.hpp"
#include "plugins/hooks.hpp"
#include "policy/current.hpp"
#include "policy/select.hpp"
#include "registry/arguments.hpp"
#include "registry/fork_child.hpp"
#include "registry/remarks.hpp"

namespace te_fl {
namespace {

using registry::Call;
using registry::Choice;
using registry::EpochGuard;
using registry::Implementation;
using registry::OpRow;
using registry::RouteEntry;
using registry::RouteKey;
using registry::Step;
using registry::Table;
using registry::this_thread;
using registry::ThreadRecord;
using registry::UsageCounts;

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
  core::find_device_again(device);
  for (OpManager::Impl* m : managers_now()) m->table_owner.restore(device);
}

void device_lost(const Device& device, const std::string& reason) {
  const Status why = core::lost_device(device, reason);
  for (OpManager::Impl* m : managers_now()) m->table_owner.bar(device, why);
}

void device_barred(const Device& device) {
  const Status why = core::withdrawn_device(device);
  for (OpManager::Impl* m : managers_now()) m->table_owner.bar(device, why);
}

void device_left(const Device& device) {
  for (OpManager::Impl* m : managers_now()) m->table_owner.drop_plans(device);
}

void release_device(const Device& device) {
  for (OpManager::Impl* m : managers_now()) {
    m->arenas.release(device);
    m->staging.release(device);
  }
}

void stream_goes(const Device& device, void* stream) {
  for (OpManager::Impl* m : managers_now()) m->arenas.release(device, stream);
}

void count(std::atomic<uint64_t>& counter) noexcept {
  // One writer: no read-modify-write instruction is needed.
  counter.store(counter.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
}

// The warm way: supports() if there is one, and run(), with a context on the stack. Otherwise the
// complete one.
inline Status run(Call& call, const Implementation* fast, std::atomic<uint64_t>* counter) {
  if (fast == nullptr || call.manager.care() != 0) return registry::run_route(call, nullptr);
  core::ErrorText errors;
  const te_fl_context context = registry::context_of(call, false, errors.sink());
  te_fl_status code = TE_FL_OK;
  if (fast->checks_support) code = registry::ask_support(*fast, context, call.args, errors);
  if (code == TE_FL_OK) code = registry::guarded_run(*fast, context, call.args, errors);
  if (code == TE_FL_OK) [[likely]] {
    count(*counter);
    registry::note_enqueued(call, *fast);
    return {};
  }
  const registry::Failure failure{fast, code, errors.text()};
  return registry::run_route(call, &failure);
}

[[gnu::cold, gnu::noinline]] Status wrong_signature(const Call& call) {
  return invalid_argument(
      "op '" + std::string(call.row.compiled->schema().name) +
      "': the arguments have other dtypes, scaling modes or another device than those the "
      "handle was prepared for (" +
      registry::describe_arguments(call.row.compiled->schema(), call.args) +
      "); prepare another handle");
}

Resolution resolution_of(const OpRow& row, const Choice& choice, const void* args,
                         const std::vector<registry::Failure>& failures) {
  Resolution r;
  r.op = row.compiled->schema().name;
  r.policy = policy::describe_for(*choice.settings, r.op);
  r.candidates = registry::candidates_of(row, choice, args, failures);
  for (const Candidate& c : r.candidates) {
    if (c.chosen) r.impl_id = c.impl_id;
  }
  return r;
}

// Asks those that answer per call; the ones that refuse. Stops at the first that does not, if
// `first_only`. An answer that would end the call is an error.
Result<std::vector<registry::Failure>> refusals(const Call& call, const Choice& choice,
                                                bool first_only) {
  std::vector<registry::Failure> list;
  bool served = false;
  for (size_t i = 0; i < choice.decision.order.size(); ++i) {
    const policy::Verdict& v = choice.decision.order[i];
    if (v.refusal != policy::Refusal::kNone || !choice.permits(i)) continue;
    const Implementation& impl = *call.row.impls[v.option];
    core::ErrorText errors;
    te_fl_status code = TE_FL_OK;
    if (v.staged) {
      code = registry::ask_staged(call, impl, choice.settings->deterministic, errors);
    } else if (impl.checks_support) {
      const te_fl_context context =
          registry::context_of(call, choice.settings->deterministic, errors.sink());
      code = registry::ask_support(impl, context, call.args, errors);
    }
    if (code != TE_FL_OK) {
      const bool lost = TE_FL_STATUS_CODE(code) == TE_FL_DEVICE_LOST;
      if (lost || (!served && !registry::may_follow(code)))
        return registry::after_failure(call, impl, code, errors.text());
      list.push_back({&impl, code, errors.text()});
    } else if (first_only) {
      break;
    } else {
      served = true;
    }
  }
  return list;
}

Result<Choice> choose(Call& call) {
  return registry::choose(call.manager.table_owner, call.table, call.row, call.signature,
                          call.policy, call.capturing);
}

Step chosen(const OpRow& row, const Choice& choice,
            const std::vector<registry::Failure>& failures) {
  for (size_t i = 0; i < choice.decision.order.size(); ++i) {
    const policy::Verdict& v = choice.decision.order[i];
    const Implementation* impl = row.impls[v.option].get();
    const bool failed = std::any_of(failures.begin(), failures.end(),
                                    [&](const auto& f) { return f.impl == impl; });
    if (v.refusal == policy::Refusal::kNone && choice.permits(i) && !failed)
      return {impl, v.staged};
  }
  return {};
}

UsageCounts counts_of(const Implementation& impl) {
  return {registry::read_counter(impl.counter), impl.staged.calls.load(std::memory_order_relaxed),
          impl.staged.bytes.load(std::memory_order_relaxed),
          impl.staged.copying.load(std::memory_order_relaxed),
          impl.staged.waiting.load(std::memory_order_relaxed)};
}

// Enters and finds the op's row, then does `f(call)`. T is Status or a Result.
template <class T, class F>
T with_call(OpManager::Impl& manager, OpId op, const void* args, const CallOptions& options,
            F&& f) {
  ThreadRecord& thread = this_thread();
  const EpochGuard guard(thread.slot);
  const Table& table = manager.table_owner.table();
  if (op.index >= table.ops.size()) [[unlikely]]
    return registry::no_such_op(table, op);
  Call call{manager, thread, table, *table.ops[op.index], op.index, args, options};
  return f(call);
}

}  // namespace

namespace registry {

void managers_after_fork_in_child() {
  // Without the lock: it comes after those of the arenas, and the child has one thread.
  for (OpManager::Impl* m : managers()) {
    m->arenas.forget_after_fork();
    m->staging.forget_after_fork();
  }
  instance_after_fork_in_child();
}

}  // namespace registry

OpManager::Impl::Impl(OpRegistry& r) : registry(r), table_owner(r.impl()) {
  std::lock_guard lock(mutex);
  managers().push_back(this);
  core::g_device_hooks.added.store(&device_added, std::memory_order_release);
  core::g_device_hooks.lost.store(&device_lost, std::memory_order_release);
  core::g_device_hooks.barred.store(&device_barred, std::memory_order_release);
  core::g_device_hooks.left.store(&device_left, std::memory_order_release);
  plugins::g_hooks.release_device.store(&release_device, std::memory_order_release);
  core::g_stream_goes.store(&stream_goes, std::memory_order_release);
}

OpManager::Impl::~Impl() {
  std::lock_guard lock(mutex);
  std::erase(managers(), this);
}

uint64_t OpManager::Impl::read_care() {
  const auto on = [](const char* name) {
    const Result<bool> value = environment::get_bool(name);
    return value.ok() && *value;
  };
  const auto given = [](const char* name) {
    const Result<std::string> value = environment::get(name);
    return value.ok() && !core::trim(*value).empty();
  };
  (void)on("TE_FL_SYNC");  // reads the environment, if nothing has yet
  // The generation comes first: what changes meanwhile is then read again by the next call.
  const uint64_t generation = environment::generation();
  const uint64_t care = (on("TE_FL_SYNC") ? uint64_t{kSync} : 0) |
                        (on("TE_FL_VALIDATE") ? uint64_t{kValidate} : 0) |
                        (given("TE_FL_VERIFY") ? uint64_t{kVerify} : 0) |
                        (given("TE_FL_TRACE") ? uint64_t{kTrace} : 0);
  care_word.store(generation << kCareBits | care, std::memory_order_relaxed);
  return care;
}

OpManager::OpManager(OpRegistry& registry) : impl_(std::make_unique<Impl>(registry)) {}
OpManager::~OpManager() = default;
OpRegistry& OpManager::registry() noexcept { return impl_->registry; }

Status OpManager::call(OpId op, const void* args, const CallOptions& options) {
  return with_call<Status>(*impl_, op, args, options, [](Call& call) -> Status {
    if (!registry::prepare_warm(call)) [[unlikely]]
      TE_FL_RETURN_IF_ERROR(registry::prepare_call(call));
    const RouteKey key(call.op, call.signature, call.policy, call.capturing);
    const RouteEntry* entry = call.thread.routes.find(call.table.id, key);
    if (entry == nullptr) [[unlikely]] {
      TE_FL_ASSIGN_OR_RETURN(entry, registry::route_of(call));
    }
    return run(call, entry->fast, entry->counter);
  });
}

Status OpManager::call(std::string_view op, const void* args, const CallOptions& options) {
  TE_FL_ASSIGN_OR_RETURN(const OpId id, impl_->registry.find(op));
  return call(id, args, options);
}

Result<PreparedOp> OpManager::prepare(OpId op, const void* args, const CallOptions& options) {
  return with_call<Result<PreparedOp>>(
      *impl_, op, args, options, [&](Call& call) -> Result<PreparedOp> {
        TE_FL_RETURN_IF_ERROR(registry::prepare_call(call));
        TE_FL_ASSIGN_OR_RETURN(const Choice choice, choose(call));
        TE_FL_ASSIGN_OR_RETURN(const auto failures, refusals(call, choice, true));
        if (chosen(call.row, choice, failures).impl == nullptr)
          return registry::no_candidate(call, choice, failures);
        PreparedOp handle;
        handle.rep_ = std::make_shared<PreparedOp::Rep>(
            PreparedOp::Rep{impl_.get(), op, call.signature, g_handles.fetch_add(1)});
        return handle;
      });
}

Status PreparedOp::call(const void* args, const CallOptions& options) const {
  if (rep_ == nullptr)
    return failed_precondition("an empty PreparedOp was called; OpManager::prepare makes one");
  const Rep& rep = *rep_;
  return with_call<Status>(*rep.manager, rep.op, args, options, [&](Call& call) -> Status {
    registry::HandleEntry& known = call.thread.handles.at(rep.number);
    if (known.handle == rep.number && known.last.is(args)) [[likely]] {
      call.signature = rep.signature;
      if (!registry::read_state(call)) [[unlikely]]
        TE_FL_RETURN_IF_ERROR(registry::prepare_call(call));
    } else {
      if (!registry::prepare_warm(call)) [[unlikely]]
        TE_FL_RETURN_IF_ERROR(registry::prepare_call(call));
      if (!(call.signature == rep.signature)) [[unlikely]]
        return wrong_signature(call);
      if (known.handle != rep.number) known.take(rep.number);
      if (known.worth_remembering()) core::remember_exactly(*call.row.compiled, args, known.last);
    }
    if (known.table != call.table.id || known.policy != call.policy ||
        known.capturing != call.capturing) [[unlikely]] {
      TE_FL_ASSIGN_OR_RETURN(const RouteEntry* entry, registry::route_of(call));
      known.table = call.table.id;
      known.policy = call.policy;
      known.capturing = call.capturing;
      known.fast = entry->fast;
      known.counter = entry->counter;
    }
    return run(call, known.fast, known.counter);
  });
}

Result<Resolution> OpManager::resolve(OpId op, const void* args, const CallOptions& options) {
  return with_call<Result<Resolution>>(
      *impl_, op, args, options, [](Call& call) -> Result<Resolution> {
        TE_FL_RETURN_IF_ERROR(registry::prepare_call(call));
        TE_FL_ASSIGN_OR_RETURN(const Choice choice, choose(call));
        TE_FL_ASSIGN_OR_RETURN(const auto failures, refusals(call, choice, false));
        return resolution_of(call.row, choice, call.args, failures);
      });
}

Result<Resolution> OpManager::explain(OpId op, const CallProfile& profile) {
  (void)core::find_device(profile.device);  // loads its plugin, which no thread does inside an op
  const CallOptions options;
  return with_call<Result<Resolution>>(
      *impl_, op, nullptr, options, [&](Call& call) -> Result<Resolution> {
        TE_FL_ASSIGN_OR_RETURN(const SelectionPolicy policy, current_policy());
        call.policy = policy.id();
        call.signature.device = profile.device;
        TE_FL_RETURN_IF_ERROR(registry::check_profile(call.row, profile));
        for (const DType t : profile.dtypes)
          call.signature.dtypes |= TE_FL_BIT(static_cast<uint32_t>(t));
        for (const Scaling s : profile.scalings)
          call.signature.scalings |= TE_FL_BIT(static_cast<uint32_t>(s));
        if (profile.scalings.empty()) call.signature.scalings = TE_FL_BIT(TE_FL_SCALING_NONE);
        TE_FL_ASSIGN_OR_RETURN(const Choice choice, choose(call));
        return resolution_of(call.row, choice, nullptr, {});
      });
}

Result<size_t> OpManager::saved_bytes(OpId op, const void* args, const CallOptions& options) {
  return with_call<Result<size_t>>(*impl_, op, args, options, [](Call& call) -> Result<size_t> {
    TE_FL_RETURN_IF_ERROR(registry::prepare_call(call));
    TE_FL_ASSIGN_OR_RETURN(const Choice choice, choose(call));
    TE_FL_ASSIGN_OR_RETURN(const auto failures, refusals(call, choice, true));
    const Step step = chosen(call.row, choice, failures);
    const Implementation* impl = step.impl;
    if (impl == nullptr) return registry::no_candidate(call, choice, failures);
    if (impl->desc.saved_bytes == nullptr) return size_t{0};
    core::ErrorText errors;
    const bool deterministic = choice.settings->deterministic;
    size_t bytes = 0;
    te_fl_status code = TE_FL_OK;
    if (step.staged) {
      code = registry::ask_staged_saved_bytes(call, *impl, deterministic, bytes, errors);
    } else {
      const te_fl_context context = registry::context_of(call, deterministic, errors.sink());
      code = registry::ask_saved_bytes(*impl, context, call.args, bytes, errors);
    }
    if (code != TE_FL_OK) return registry::after_failure(call, *impl, code, errors.text());
    return bytes;
  });
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
    for (const auto& impl : row->impls) {
      const UsageCounts before = base[impl->number], now = counts_of(*impl);
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

void OpManager::reset_usage() {
  std::map<uint64_t, UsageCounts> base;
  {
    const EpochGuard guard(this_thread().slot);
    for (const auto& row : impl_->table_owner.table().ops) {
      for (const auto& impl : row->impls) base[impl->number] = counts_of(*impl);
    }
  }
  std::lock_guard lock(mutex);
  impl_->usage_base = std::move(base);
}

Status OpManager::reload() {
  TE_FL_RETURN_IF_ERROR(environment::reload());
  registry::log_remarks();
  registry::forget_quarantine_file();
  registry::choose_again();
  return current_policy().status();
}

}  // namespace te_fl
