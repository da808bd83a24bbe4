#pragma once

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

// One call, and the functions that take it through dispatch in this order: prepare_call() or
// prepare_warm() (choose.cpp), route_of() (choose.cpp), run_route() (run.cpp).
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

// One call on its way: valid inside an EpochGuard.
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
  // The thread's record of the call; null where it remembers none like it. An op that runs inside
  // this one may make it that of another call, which its number tells.
  registry::KnownCall* known = nullptr;
  uint64_t known_number = 0;

  // Null if what was known is another call's by now.
  registry::KnownCall* still_known() const noexcept {
    return known != nullptr && known->filled == known_number ? known : nullptr;
  }
};

// The decision for a call, with all that it was made from.
struct Choice : policy::Ranking {
  const PolicySettings* settings = nullptr;
  std::vector<policy::Barred> barred;  // call.barred
  policy::CallTraits call;

  // STRICT: nothing but the first choice may run.
  bool permits(size_t place) const {
    return !settings->strict || static_cast<int32_t>(place) == first;
  }
};

// An implementation that was tried and moved on from.
struct Failure {
  const Implementation* impl;
  te_fl_status status;
  std::string text;
};

// May the next implementation try? Falling back is for "cannot", not for "went wrong", unless the
// implementation itself said that nothing came of it. A mistake of the caller's is a mistake
// whoever runs, and on a lost device nobody does.
inline bool may_follow(te_fl_status code) noexcept {
  const te_fl_status reason = TE_FL_STATUS_CODE(code);
  return TE_FL_STATUS_IS_CLEAN(code) && reason != TE_FL_INVALID_ARGUMENT &&
         reason != TE_FL_DEVICE_LOST;
}

// Tells which implementation served a call, and which ones failed before.
struct Served {
  const Implementation* impl = nullptr;
  bool staged = false;
  std::vector<Failure> failures;
};

// Decides. Errors: the device is lost, or its properties cannot be read.
// `policy` is that of the call, or another. A call of no arguments has no size.
Result<Choice> choose(const Call& call, uint32_t policy);
// The cached choice of a warm call, made if need be.
Result<const RouteEntry*> route_of(Call& call);
// Runs a call along its route; the slow, complete way. `first`: the route's first implementation
// has run and failed so.
Status run_route(Call& call, const Failure* first);
// As run_route(), and tells which implementation served the call.
Status run_order(Call& call, const Failure* first, Served& served);
// Runs a host implementation on copies of the call's arguments, which it is to find on the host;
// not counted, and nobody follows.
te_fl_status run_on_copies(const Call& call, const Implementation& impl, te_fl_context& context,
                           const void* args, core::ErrorText& errors);
// Ask the device of the call's tensors, if it can tell: is the stream one of it, does the random
// state lie in its memory?
Status check_stream(const Call& call);
Status check_random_state(const Call& call);
// Sets call.capturing. False: the device did not answer; ask_stream() says why, if that is a reason
// to refuse the call.
bool read_stream(Call& call) noexcept;
// The complete way.
Status ask_stream(Call& call);

// Fills the context of a call but for scratch and plan.
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
// supports() of an implementation that asks per call: OK, or why not.
te_fl_status ask_support(const Implementation& impl, const te_fl_context& context, const void* args,
                         core::ErrorText& errors);
// As ask_support(), for the call's own arguments: a yes is remembered for the very same call.
[[gnu::always_inline]] inline te_fl_status support_of(const Call& call, const Implementation& impl,
                                                      const te_fl_context& context,
                                                      core::ErrorText& errors) {
  registry::KnownCall* known = call.still_known();
  const uint64_t context_word = registry::PlanKey::whole_context_word(context);
  if (known != nullptr && known->accepted_by == impl.number &&
      known->accepted_context == context_word)
    return TE_FL_OK;
  const te_fl_status code = ask_support(impl, context, call.args, errors);
  known = call.still_known();  // supports() should run no op, but might
  if (code == TE_FL_OK && known != nullptr) {
    known->accepted_by = impl.number;
    known->accepted_context = context_word;
  }
  return code;
}
te_fl_status ask_saved_bytes(const Implementation& impl, const te_fl_context& context,
                             const void* args, size_t& bytes, core::ErrorText& errors);
// A host implementation's answer for copies of the call's tensors: OK, or why it cannot serve them.
te_fl_status ask_staged(const Call& call, const Implementation& impl, bool deterministic,
                        core::ErrorText& errors);
te_fl_status ask_staged_saved_bytes(const Call& call, const Implementation& impl,
                                    bool deterministic, size_t& bytes, core::ErrorText& errors);
// The line in which an implementation names the kernels that its run() would launch for the call,
// or the reason for which it names none; one of the two is empty.
struct Described {
  std::string text, silent;
};
// Asks the implementation, which accepts the call: with metadata of copies if it is staged.
Described described(const Call& call, const Step& step, bool deterministic);
// The status of the exception in flight, which R5 forbids. Its words go to `errors`.
[[gnu::cold]] te_fl_status exception_status(const char* entry, core::ErrorText& errors) noexcept;

// Calls into an implementation; an exception, and a status that is none, becomes one.
template <class F>
[[gnu::always_inline]] inline te_fl_status entered(const char* entry, core::ErrorText& errors,
                                                   F&& f) noexcept {
  try {
    return errors.answered(f());
  } catch (...) {
    return exception_status(entry, errors);
  }
}

[[gnu::always_inline]] inline te_fl_status guarded_run(const Implementation& impl,
                                                       const te_fl_context& context,
                                                       const void* args,
                                                       core::ErrorText& errors) noexcept {
  return entered("run() threw an exception (rule R5)", errors,
                 [&] { return impl.desc.run(impl.desc.self, &context, args); });
}

// Remembers what runs on a device, for the error that may show later.
[[gnu::always_inline]] inline void note_enqueued(const Call& call, const Implementation& impl) {
  if (call.signature.device.type == TE_FL_DEVICE_CPU) [[likely]]
    return;  // signatures name every kind of host memory so
  core::note_op(call.signature.device, call.options.stream, impl.interned_op, impl.interned_id);
}

// Reads the state on which the choice depends besides the signature. False: the policy is invalid,
// or the device did not answer for the stream.
[[gnu::always_inline]] inline bool read_state(Call& call) {
  call.policy = policy::current_id();
  if (!call.signature.device.is_host() && !read_stream(call)) [[unlikely]]
    return false;
  return call.policy != policy::kInvalidPolicy;
}
// Checks the arguments, which are there, and fills the signature, by what the thread knows if it
// knows such a call. False: they are out of order.
bool recognise(Call& call) noexcept;
// Checks the arguments and reads the state. False: prepare_call() says why, or that all is in order
// after all.
[[gnu::always_inline]] inline bool prepare_warm(Call& call) {
  if (call.args == nullptr || !recognise(call)) [[unlikely]]
    return false;
  return read_state(call);
}
Status prepare_call(Call& call);

// The record of an opaque forward, if `args` holds one for this op to read; null otherwise.
te_fl_saved* saved_record(const OpRow& row, const void* args) noexcept;

// ---- messages

Status bad_arguments(const OpRow& row, const void* args);
Status no_such_op(const Table& table, OpId op);
// A described call that no arguments could make: a dtype or scaling mode that no tensor of the op
// has, or FP8 codes without a scaling mode.
Status check_profile(const OpRow& row, const CallProfile& profile);
Status invalid_policy(const OpRow& row);
// Wraps an implementation's own words.
Status implementation_error(const Call& call, const Implementation& impl, te_fl_status code,
                            const std::string& text);
// As implementation_error(), for a failure that ends the call: retires the device if it is lost.
Status after_failure(const Call& call, const Implementation& impl, te_fl_status code,
                     std::string text);
// The failure of an implementation after which the next one was tried.
std::string failure_text(const Failure& failure);
// Every implementation with the reason why it does not serve the call, and a way out.
Status no_candidate(const Call& call, const Choice& decision, const std::vector<Failure>& failures);
std::vector<Candidate> candidates_of(const OpRow& row, const Choice& decision, const void* args,
                                     const std::vector<Failure>& failures);
// Warns once of vendors and implementations that a policy names and that are not there.
void warn_absent(const Table& table, const OpRow& row, const PolicySettings& settings);

}  // namespace te_fl::dispatch
