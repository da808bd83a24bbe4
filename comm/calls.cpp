#include "comm/calls.hpp"

#include <algorithm>
#include <cstring>
#include <sstream>

#include "comm/state.hpp"
#include "core/op/call_words.hpp"
#include "core/op/collective.hpp"
#include "policy/current.hpp"
#include "te_fl/dtype.hpp"

namespace te_fl::comm {
namespace {

using core::CollectiveCall;

// Determines from an op's schema which properties of a call must be equal on all ranks.
OpFacts find_facts(const core::CompiledOp& op) {
  OpFacts facts;
  facts.layout = op.layout().number;
  const te_fl_op_schema& schema = op.schema();
  for (uint32_t i = 0; i < schema.arg_count; ++i) {
    const te_fl_arg_desc& arg = *schema.args[i];
    if (arg.type == TE_FL_ARG_I64_LIST) facts.uneven = true;
    if (arg.type == TE_FL_ARG_I32 && std::strcmp(arg.name, "peer") == 0) facts.transfer = true;
    if (arg.type == TE_FL_ARG_TENSOR && facts.tensor < 0) facts.tensor = arg.offset;
    const bool peer = std::strcmp(arg.name, "peer") == 0;
    if (arg.type == TE_FL_ARG_ENUM || (arg.type == TE_FL_ARG_I32 && !peer))
      facts.alike.push_back({arg.name, arg.offset, arg.enum_names});
  }
  return facts;
}

// Like find_facts(op), with a cache in `state`. Only the thread that is inside a call of the
// communicator may use it.
const OpFacts& find_facts(Comm::State& state, const core::CompiledOp& op) {
  const uint64_t layout = op.layout().number;
  for (const OpFacts& known : state.known_ops) {
    if (known.layout == layout) return known;
  }
  return state.known_ops.emplace_back(find_facts(op));
}

void write_step(Step& step, const CollectiveCall& call, const OpFacts& facts, uint64_t number) {
  step.number = number;
  step.op = call.op.schema().name;
  const te_fl_tensor* t = nullptr;
  if (facts.tensor >= 0)
    std::memcpy(&t, static_cast<const char*>(call.args) + facts.tensor, sizeof t);
  step.rank = -1;
  if (t == nullptr) return;
  step.dtype = t->dl.dtype;
  step.rank = std::min<int32_t>(t->dl.ndim, static_cast<int32_t>(step.shape.size()));
  for (int i = 0; i < step.rank; ++i) step.shape[static_cast<size_t>(i)] = t->dl.shape[i];
}

std::string by_name(const Comm::State& state) { return "communicator '" + state.name + "'"; }

// The store key under which a step is compared. If a call was refused before anything was sent, the
// next call has the same number. If it is the same call again, it uses the same key, since the
// other ranks have written their texts under that key. A different call, which all ranks make
// together, gets a new key.
std::string comparison(Comm::State& state, uint64_t number, const std::string& mine) {
  Compared& last = state.compared;
  if (last.number != number)
    last = {number, 0, mine, last.word};
  else if (last.text != mine)
    last = {number, last.attempt + 1, mine, last.word};
  std::string word = "step/" + std::to_string(number);
  if (last.attempt > 0) word += "." + std::to_string(last.attempt);
  return word + "/";
}

int32_t value_of(const OpFacts::Alike& arg, const void* args) {
  int32_t value = 0;
  std::memcpy(&value, static_cast<const char*>(args) + arg.offset, sizeof value);
  return value;
}

// The name of an enum's value, such as "max"; for other arguments the number.
std::string value_name(const OpFacts::Alike& arg, int32_t value) {
  std::istringstream words(arg.words == nullptr ? "" : arg.words);
  std::string word;
  for (int32_t i = 0; words >> word; ++i) {
    if (i == value) return word;
  }
  return std::to_string(value);
}

// TE_FL_VALIDATE: compares the call with the calls of the other ranks before any rank begins it.
Status compare(Comm::State& state, const CollectiveCall& call, const Step& step,
               const OpFacts& facts) {
  if (state.c.size == 1 || facts.transfer) return {};
  NamespacedStore& store = *state.face;
  std::string mine = facts.uneven ? step.text_of_rows() : step.text();
  for (const OpFacts::Alike& arg : facts.alike) {
    const int32_t value = value_of(arg, call.args);
    // An invalid root rank is a local error, which is refused before anything is sent.
    if (arg.words == nullptr && (value < 0 || value >= state.c.size)) return {};
    mine += ", " + std::string(arg.name) + " " + value_name(arg, value);
  }
  const std::string word = comparison(state, step.number, mine);
  TE_FL_RETURN_IF_ERROR(store.store().set(store.key(word + std::to_string(state.c.rank)), mine));
  std::string others;
  for (int r = 0; r < state.c.size; ++r) {
    TE_FL_ASSIGN_OR_RETURN(const std::string its,
                           store.store().get(store.key(word + std::to_string(r)), state.timeout));
    if (its != mine)
      others += (others.empty() ? "" : "; ") + ("rank " + std::to_string(r)) + ": " + its;
  }
  if (others.empty()) {
    const std::string own = word + std::to_string(state.c.rank);
    const std::string before = std::exchange(state.compared.word, own);
    // All ranks have reached this comparison, so all have read this rank's text of the previous
    // one.
    if (!before.empty() && before != own) forget(store, before);
    return {};
  }
  return Status(StatusCode::kCommFailed, by_name(state) + ": rank " + std::to_string(state.c.rank) +
                                             " calls " + mine +
                                             ", and the others do not (TE_FL_VALIDATE): " + others);
}

// Returns the policy for a call: the communicator's policy, with deterministic results if the
// thread's policy requires them.
uint32_t policy_of(const Comm::State& state, uint32_t current) {
  if (current == state.policy) return current;
  return policy::settings_of(current).deterministic ? state.deterministic_policy : state.policy;
}

// Like compare(), and fails the communicator after an error.
Status validate(const std::shared_ptr<Comm::State>& state, const CollectiveCall& call,
                const OpFacts& facts, uint64_t number) {
  Step step;
  write_step(step, call, facts, number);
  Status same = compare(*state, call, step, facts);
  if (same.ok()) return same;
  if (same.code() != StatusCode::kCommFailed) {
    same = Status(StatusCode::kCommFailed,
                  by_name(*state) + ": " + step.text() + " could not be compared (TE_FL_VALIDATE)",
                  same);
  }
  fail_all(state, same);
  return same;
}

// Keeps the communicator alive and marks the thread as inside it, from begin() to end() of a call.
class Part {
 public:
  explicit Part(std::shared_ptr<Comm::State> state) : state_(std::move(state)) { state_->use(); }
  Part(const Part&) = delete;
  Part& operator=(const Part&) = delete;
  ~Part() {
    if (state_ == nullptr) return;
    if (inside_) state_->inside.store(false, std::memory_order_release);
    state_->leave();
  }
  // False if another thread is inside.
  bool enter() { return inside_ = !state_->inside.exchange(true, std::memory_order_acquire); }
  // Passes the reference to the ticket; end() releases it.
  std::shared_ptr<Comm::State> keep() { return std::move(state_); }

 private:
  std::shared_ptr<Comm::State> state_;
  bool inside_ = false;
};

Status begin(const CollectiveCall& call, core::CollectiveTicket& ticket) {
  const std::shared_ptr<Comm::State> state = find(call.communicator.id);
  if (state == nullptr) return {};  // a program's own communicator, not one of te-fl
  TE_FL_RETURN_IF_ERROR(check_process(*state));
  Part part(state);
  if (state->dropped.load()) {
    return failed_precondition(by_name(*state) +
                               " was destroyed by another thread; it lives until the last of its "
                               "collectives has returned, and no other begins");
  }
  if (state->failed.load(std::memory_order_acquire)) return state->failed_status();
  if (call.capturing && (state->provider->desc.flags & TE_FL_COMM_CAPTURABLE) == 0) {
    return failed_precondition(by_name(*state) + " is of provider '" + state->provider->name +
                               "', whose collectives cannot be captured into a graph; leave them "
                               "out of the graph");
  }
  if (!part.enter()) {
    return failed_precondition(by_name(*state) +
                               " is used by another thread at this moment; a communicator is for "
                               "one thread at a time: split one off for each");
  }
  const OpFacts& facts = find_facts(*state, call.op);
  Step& last = facts.transfer ? state->last_transfer : state->last;
  if (state->validates) [[unlikely]]
    TE_FL_RETURN_IF_ERROR(validate(state, call, facts, last.number + 1));
  {
    const std::lock_guard lock(state->mutex);
    write_step(last, call, facts, last.number + 1);
    state->in_transfer = facts.transfer;
  }
  state->since.store(Clock::now().time_since_epoch().count(), std::memory_order_release);
  ticket.policy = policy_of(*state, ticket.policy);
  ticket.transfer = facts.transfer;
  ticket.communicator = part.keep();
  return {};
}

Status failed_in(const Comm::State& state, const Step& step, Status cause) {
  return Status(StatusCode::kCommFailed,
                by_name(state) + ", rank " + std::to_string(state.c.rank) + " of " +
                    std::to_string(state.c.size) + ": " + step.text() + " failed",
                std::move(cause));
}

// Returns the failure that another thread has recorded during this call, for instance because
// another communicator of the process failed first. If the failure's text does not describe this
// call, adds a description of it.
Status reported_failure(Comm::State& state, const Step& step) {
  const Status reported = state.failed_status();
  if (reported.message().find(step.text()) != std::string::npos) return reported;
  const std::lock_guard lock(state.mutex);
  return state.failure = failed_in(state, step, reported);
}

Status end(const CollectiveCall& call, core::CollectiveTicket& ticket, Status result) {
  if (ticket.communicator == nullptr) return result;
  const auto state = std::static_pointer_cast<Comm::State>(std::move(ticket.communicator));
  const Use use(*state, true);
  // While this thread is inside, no other thread writes to `last`.
  Step& last = ticket.transfer ? state->last_transfer : state->last;
  const Clock::time_point since{
      Clock::duration(state->since.exchange(0, std::memory_order_relaxed))};
  if (result.ok()) [[likely]] {
    if (!wait_for_group(state, call, last) && !call.capturing)
      mark_enqueued(*state, call.stream, last, since);
    state->inside.store(false, std::memory_order_release);
    return result;
  }
  // A call that failed without having sent anything, except because of another rank's failure.
  const bool is_local = result.clean() && result.code() != StatusCode::kCommFailed;
  const Step step = last;
  if (is_local) {
    const std::lock_guard lock(state->mutex);
    --last.number;  // nothing of the call was sent
  }
  state->inside.store(false, std::memory_order_release);
  if (is_local) return result;
  // Other ranks may wait for this rank in the call, or may have completed a call that this rank has
  // not, so the communicator fails.
  if (state->failed.load(std::memory_order_acquire)) return reported_failure(*state, step);
  fail_all(state, failed_in(*state, step, result));
  return result.code() == StatusCode::kCommFailed ? reported_failure(*state, step) : result;
}

uint32_t policy_for(const te_fl_communicator& communicator, uint32_t current, std::string& name) {
  const std::shared_ptr<Comm::State> state = find(communicator.id);
  if (state == nullptr) return current;
  const uint32_t policy = policy_of(*state, current);
  if (policy != current) name = state->name;
  return policy;
}

constexpr core::CollectiveKeeper kKeeper{begin, end, policy_for};

}  // namespace

std::string Step::text_of_rows() const {
  std::string out =
      std::string(op == nullptr ? "nothing" : op) + " number " + std::to_string(number);
  if (rank < 0) return out;
  const int index = dtype_index(dtype);
  return out + " of " +
         (index == kInvalidDType ? "?" : std::string(te_fl::name(static_cast<DType>(index))));
}

std::string Step::text() const {
  std::string out = text_of_rows();
  if (rank < 0) return out;
  out += "[";
  for (int i = 0; i < rank; ++i)
    out += (i == 0 ? "" : ",") + std::to_string(shape[static_cast<size_t>(i)]);
  return out + "]";
}

void mark_enqueued(Comm::State& state, void* stream, const Step& step, Clock::time_point since) {
  if (state.device.is_host()) return;
  const std::lock_guard lock(state.mutex);
  Mark& mark = state.oldest.set ? state.newest : state.oldest;
  if (mark.event.get() == nullptr) {
    Result<Event> made = Event::create(state.device);
    if (!made.ok()) return;
    mark.event = std::move(made).value();
  }
  if (!mark.event.record(stream).ok()) return;
  mark.step = step;
  mark.since = since;
  mark.set = true;
}

void watch_calls() { core::g_collective_keeper.store(&kKeeper, std::memory_order_release); }

}  // namespace te_fl::comm
