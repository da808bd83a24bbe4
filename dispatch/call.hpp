#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "core/base/error_text.hpp"
#include "core/base/settings.hpp"
#include "core/device/recent_ops.hpp"
#include "policy/current.hpp"
#include "policy/select.hpp"
#include "registry/plan_cache.hpp"
#include "registry/registry_impl.hpp"
#include "registry/thread_record.hpp"
#include "te_fl/op_manager.hpp"

// One call, and the stages of dispatch in their order: prepare_call() or prepare_warm()
// (choose.cpp), find_route() (choose.cpp), run_route() (run.cpp).
namespace te_fl::dispatch {

using registry::EpochGuard;
using registry::Implementation;
using registry::OpRow;
using registry::Route;
using registry::RouteEntry;
using registry::RouteKey;
using registry::Step;
using registry::Table;
using registry::ThreadRecord;

// The state of one call during dispatch. Valid inside an EpochGuard.
struct Call {
  OpManager::Impl& manager;
  ThreadRecord& thread;
  const Table& table;
  const OpRow& row;
  uint32_t op;
  const void* args;
  const CallOptions& options;
  core::Signature signature{};
  uint32_t policy = 0;
  bool capturing = false;
  // The thread's cached record of this call; null if there is none. A nested op may reuse the
  // record for another call; known_number detects that.
  registry::KnownCall* known = nullptr;
  uint64_t known_number = 0;

  // Returns `known`, or null if the record belongs to another call by now.
  registry::KnownCall* still_known() const noexcept {
    return known != nullptr && known->filled == known_number ? known : nullptr;
  }
};

// The ranking of the implementations for a call, with the inputs of the decision.
struct Choice : policy::Ranking {
  const PolicySettings* settings = nullptr;
  std::vector<policy::Barred> barred;  // owns what call.barred refers to
  policy::CallTraits call;

  // True if the policy allows the implementation at `place`. Under STRICT only the first choice may
  // run.
  bool permits(size_t place) const {
    return !settings->strict || static_cast<int32_t>(place) == first;
  }
};

// An implementation that was tried and failed.
struct Failure {
  const Implementation* impl;
  te_fl_status status;
  std::string text;
};

// True if the next implementation may be tried after this status, namely if the implementation does
// not support the call, or if it failed and declared that it wrote nothing (TE_FL_CLEAN). No other
// is tried after an invalid argument, which is invalid for all implementations, or on a lost
// device, where none can run.
inline bool may_follow(te_fl_status code) noexcept {
  const te_fl_status reason = TE_FL_STATUS_CODE(code);
  return TE_FL_STATUS_IS_CLEAN(code) && reason != TE_FL_INVALID_ARGUMENT &&
         reason != TE_FL_DEVICE_LOST;
}

// The implementation that executed a call, and those that failed before it.
struct Execution {
  const Implementation* impl = nullptr;
  bool staged = false;
  std::vector<Failure> failures;
};

// Decides which implementations may run the call. `policy` may differ from the call's own policy.
// Without arguments the size of the call is unknown. Errors: the device is lost, or its properties
// cannot be read.
Result<Choice> choose(const Call& call, uint32_t policy);
// Returns the cached route of a call; computes it if it is not cached.
Result<const RouteEntry*> find_route(Call& call);
// Runs a call along its route, with all checks and fallbacks. `first`: the failure of the route's
// first implementation if that has run already; otherwise null.
Status run_route(Call& call, const Failure* first);
// Like run_route() without the observers; also reports which implementation executed the call.
Status run_order(Call& call, const Failure* first, Execution& execution);
// Runs a host implementation on a second set of the call's arguments, `args`, whose tensors must
// all be in host memory. Does not count the call and does not fall back.
te_fl_status run_on_copies(const Call& call, const Implementation& impl, te_fl_context& context,
                           const void* args, core::ErrorText& errors);
// Check the options of a call by asking its device, if the device has functions for this: that the
// stream belongs to the device, and that the RNG state is in the device's memory.
Status check_stream(const Call& call);
Status check_random_state(const Call& call);
// Sets call.capturing. Returns false if the device could not report its state; ask_stream() then
// returns the error, or OK if the call may run all the same.
bool read_stream(Call& call) noexcept;
// Like read_stream(), but returns an error with its text.
Status ask_stream(Call& call);

// Makes the context of a call, without scratch and plan.
[[gnu::always_inline]] inline te_fl_context context_of(const Call& call, bool deterministic,
                                                       const te_fl_error_sink* errors) {
  te_fl_context context{};
  context.struct_size = sizeof context;
  context.flags = (deterministic ? uint32_t{TE_FL_CALL_DETERMINISTIC} : 0u) |
                  (call.capturing ? uint32_t{TE_FL_CALL_CAPTURING} : 0u);
  if (core::g_validate.load(std::memory_order_relaxed) && !call.capturing) {
    context.flags |= TE_FL_CALL_VALIDATE;
  }
  context.device = call.signature.device.to_c();
  context.provider = call.signature.device.provider;
  context.stream = call.options.stream;
  context.rng = &call.options.rng;
  context.errors = errors;
  return context;
}
// Calls supports(). Returns OK, or the status and text of the refusal.
te_fl_status ask_support(const Implementation& impl, const te_fl_context& context, const void* args,
                         core::ErrorText& errors);
// Like ask_support(), for the call's own arguments. A positive answer is cached for exactly the
// same arguments.
[[gnu::always_inline]] inline te_fl_status support_of(const Call& call, const Implementation& impl,
                                                      const te_fl_context& context,
                                                      core::ErrorText& errors) {
  registry::KnownCall* known = call.still_known();
  const uint64_t context_word = registry::PlanKey::whole_context_word(context);
  if (known != nullptr && known->accepted_by == impl.number &&
      known->accepted_context == context_word)
    return TE_FL_OK;
  const te_fl_status code = ask_support(impl, context, call.args, errors);
  known = call.still_known();  // supports() should not run ops, but may do so
  if (code == TE_FL_OK && known != nullptr) {
    known->accepted_by = impl.number;
    known->accepted_context = context_word;
  }
  return code;
}
te_fl_status ask_saved_bytes(const Implementation& impl, const te_fl_context& context,
                             const void* args, size_t& bytes, core::ErrorText& errors);
// Asks a host implementation whether it supports the call with its tensors copied to the host.
// Returns OK or the refusal.
te_fl_status ask_staged(const Call& call, const Implementation& impl, bool deterministic,
                        core::ErrorText& errors);
te_fl_status ask_staged_saved_bytes(const Call& call, const Implementation& impl,
                                    bool deterministic, size_t& bytes, core::ErrorText& errors);
// `text` is the line in which an implementation names the kernels that run() would launch for the
// call. `silent` is the reason if it names none. One of the two is empty.
struct Described {
  std::string text, silent;
};
// Calls describe() of an implementation that accepts the call. If the call is staged, the
// implementation sees the metadata of the host copies.
Described described(const Call& call, const Step& step, bool deterministic);
// Converts the exception being handled into a status, and puts its text into `errors`. Rule R5
// forbids exceptions in the entry functions of a plugin; `entry` describes the function.
[[gnu::cold]] te_fl_status exception_status(const char* entry, core::ErrorText& errors) noexcept;

// Marks a thread, which is inside a call, as inside run() of an implementation, for the report of a
// crash. The compiler keeps the order of these stores and of the plugin's code, which is called
// through a pointer and may read the record.
class InsideRun {
 public:
  [[gnu::always_inline]] InsideRun(ThreadRecord& thread, const Implementation& impl,
                                   const void* args) noexcept
      : function_(thread.slot.depth == 1 ? thread.entered[0] : inner_function(thread)) {
    function_.args.store(args, std::memory_order_relaxed);
    function_.impl.store(&impl, std::memory_order_relaxed);
  }
  [[gnu::always_inline]] ~InsideRun() { function_.impl.store(nullptr, std::memory_order_relaxed); }
  InsideRun(const InsideRun&) = delete;
  InsideRun& operator=(const InsideRun&) = delete;

 protected:
  // The element of an op that another op's implementation calls.
  [[gnu::cold]] static registry::EnteredFunction& inner_function(ThreadRecord& thread) noexcept {
    return thread.entered[std::min(thread.slot.depth, ThreadRecord::kEnteredDepth) - 1];
  }
  registry::EnteredFunction& function_;
};
// Like InsideRun for another function, whose name is a string literal, on the calling thread.
class InsideFunction : InsideRun {
 public:
  InsideFunction(const Implementation& impl, const void* args, const char* name) noexcept
      : InsideRun(*registry::t_record, impl, args) {
    function_.name.store(name, std::memory_order_relaxed);
  }
  ~InsideFunction() { function_.name.store(nullptr, std::memory_order_relaxed); }
};

// Calls a function of an implementation. An exception or an invalid status becomes a valid error
// status.
template <class F>
[[gnu::always_inline]] inline te_fl_status entered(const char* entry, core::ErrorText& errors,
                                                   F&& f) noexcept {
  try {
    return errors.answered(f());
  } catch (...) {
    return exception_status(entry, errors);
  }
}

[[gnu::always_inline]] inline te_fl_status guarded_run(ThreadRecord& thread,
                                                       const Implementation& impl,
                                                       const te_fl_context& context,
                                                       const void* args,
                                                       core::ErrorText& errors) noexcept {
  const InsideRun inside(thread, impl, args);
  return entered("run() threw an exception (rule R5)", errors,
                 [&] { return impl.desc.run(impl.desc.self, &context, args); });
}

// Records an op that was enqueued on a device, for the message of an error that appears later.
[[gnu::always_inline]] inline void note_enqueued(const Call& call, const Implementation& impl) {
  if (call.signature.device.type == TE_FL_DEVICE_CPU) [[likely]]
    return;  // in signatures, all host memory has this type
  core::note_op(call.signature.device, call.options.stream, impl.interned_op, impl.interned_id);
}

// Reads the state, besides the signature, on which the choice of the implementation depends.
// Returns false if the policy is invalid or the device could not report the state of the stream.
[[gnu::always_inline]] inline bool read_state(Call& call) {
  call.policy = policy::current_id();
  if (!call.signature.device.is_host() && !read_stream(call)) [[unlikely]]
    return false;
  return call.policy != policy::kInvalidPolicy;
}
// Checks the arguments, which must not be null, and fills the signature. Uses the thread's memo of
// earlier calls if it contains the call. Returns false if the arguments are invalid.
bool recognise(Call& call) noexcept;
// Checks the arguments and reads the state of policy and stream. If it returns false,
// prepare_call() gives the error, or finds that the call is valid after all.
[[gnu::always_inline]] inline bool prepare_warm(Call& call) {
  if (call.args == nullptr || !recognise(call)) [[unlikely]]
    return false;
  return read_state(call);
}
Status prepare_call(Call& call);

// The saved record of an opaque forward that `args` passes to this op as input; null if there is
// none.
te_fl_saved* saved_record(const OpRow& row, const void* args) noexcept;

// ---- error messages

Status bad_arguments(const OpRow& row, const void* args);
Status no_such_op(const Table& table, OpId op);
// Checks a call that is described by a profile instead of arguments. Returns an error if no
// arguments could have this profile: a dtype or scaling mode that no tensor of the op accepts, or
// FP8 data without a scaling mode.
Status check_profile(const OpRow& row, const CallProfile& profile);
Status invalid_policy(const OpRow& row);
// Makes a status from an implementation's error, with its text.
Status implementation_error(const Call& call, const Implementation& impl, te_fl_status code,
                            const std::string& text);
// Like implementation_error(), for a failure that ends the call. Also marks the device as lost if
// the status says so.
Status after_failure(const Call& call, const Implementation& impl, te_fl_status code,
                     std::string text);
// The text of a failure after which the next implementation was tried.
std::string failure_text(const Failure& failure);
// The error that no implementation can run the call. Lists all implementations with the reasons,
// and a remedy.
Status no_candidate(const Call& call, const Choice& decision, const std::vector<Failure>& failures);
std::vector<Candidate> list_candidates(const OpRow& row, const Choice& decision, const void* args,
                                       const std::vector<Failure>& failures);
// Warns once about vendors and implementations that a policy names but that are not registered.
void warn_absent(const Table& table, const OpRow& row, const PolicySettings& settings);

}  // namespace te_fl::dispatch
