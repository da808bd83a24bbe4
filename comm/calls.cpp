#include "comm/calls.hpp"

#include <algorithm>
#include <cstring>

#include "comm/rep.hpp"
#include "core/base/settings.hpp"
#include "core/op/collective.hpp"
#include "te_fl/dtype.hpp"

namespace te_fl::comm {
namespace {

using core::CollectiveCall;

// Calls of an op on different ranks need not have all in common, as its schema tells.
struct OpShape {
  bool transfer = false;  // between two ranks, not all
  bool uneven = false;    // ranks bring tensors of several sizes
};

OpShape shape_of(const te_fl_op_schema& schema) {
  OpShape shape;
  for (uint32_t i = 0; i < schema.arg_count; ++i) {
    const te_fl_arg_desc& arg = *schema.args[i];
    if (arg.type == TE_FL_ARG_I64_LIST) shape.uneven = true;
    if (arg.type == TE_FL_ARG_I32 && std::strcmp(arg.name, "peer") == 0) shape.transfer = true;
  }
  return shape;
}

const te_fl_tensor* first_tensor(const CollectiveCall& call) {
  const te_fl_op_schema& schema = call.op.schema();
  for (uint32_t i = 0; i < schema.arg_count; ++i) {
    if (schema.args[i]->type != TE_FL_ARG_TENSOR) continue;
    const te_fl_tensor* tensor = nullptr;
    std::memcpy(&tensor, static_cast<const char*>(call.args) + schema.args[i]->offset,
                sizeof tensor);
    return tensor;
  }
  return nullptr;
}

Step step_of(const CollectiveCall& call, uint64_t number) {
  Step step;
  step.number = number;
  step.op = call.op.schema().name;
  if (const te_fl_tensor* t = first_tensor(call); t != nullptr) {
    step.dtype = t->dl.dtype;
    step.rank = std::min<int32_t>(t->dl.ndim, static_cast<int32_t>(step.shape.size()));
    for (int i = 0; i < step.rank; ++i) step.shape[static_cast<size_t>(i)] = t->dl.shape[i];
  }
  return step;
}

std::string by_name(const Comm::Rep& rep) { return "communicator '" + rep.name + "'"; }

// TE_FL_VALIDATE: no rank begins before all are known to begin the same.
Status compare(Comm::Rep& rep, const Step& step, const OpShape& shape) {
  if (rep.c.size == 1 || shape.transfer) return {};
  StoreFace& store = *rep.face;
  Step compared = step;
  if (shape.uneven) compared.rank = -1;
  const std::string mine = compared.text();
  const std::string word = "step/" + std::to_string(step.number) + "/";
  TE_FL_RETURN_IF_ERROR(store.store().set(store.key(word + std::to_string(rep.c.rank)), mine));
  std::string others;
  for (int r = 0; r < rep.c.size; ++r) {
    TE_FL_ASSIGN_OR_RETURN(const std::string its,
                           store.store().get(store.key(word + std::to_string(r)), rep.timeout));
    if (its != mine)
      others += (others.empty() ? "" : "; ") + ("rank " + std::to_string(r)) + ": " + its;
  }
  if (others.empty()) return {};
  return Status(StatusCode::kCommFailed, by_name(rep) + ": rank " + std::to_string(rep.c.rank) +
                                             " calls " + mine +
                                             ", and the others do not (TE_FL_VALIDATE): " + others);
}

Status begin(const CollectiveCall& call, uint64_t& ticket) {
  const std::shared_ptr<Comm::Rep> rep = find(call.communicator.id);
  if (rep == nullptr) return {};  // a program's own, with a keeper of its own
  TE_FL_RETURN_IF_ERROR(check_process(*rep));
  if (rep->failed.load(std::memory_order_acquire)) return rep->failed_status();
  if (call.capturing && (rep->provider->desc.flags & TE_FL_COMM_CAPTURABLE) == 0) {
    return failed_precondition(by_name(*rep) + " is of provider '" + rep->provider->name +
                               "', whose collectives cannot be captured into a graph; leave them "
                               "out of the graph");
  }
  if (rep->inside.exchange(true, std::memory_order_acquire)) {
    return failed_precondition(by_name(*rep) +
                               " is used by another thread at this moment; a communicator is for "
                               "one thread at a time: split one off for each");
  }
  const OpShape shape = shape_of(call.op.schema());
  Step step;
  {
    const std::lock_guard lock(rep->mutex);
    Step& last = shape.transfer ? rep->last_transfer : rep->last;
    step = step_of(call, last.number + 1);
  }
  if (core::g_validate.load(std::memory_order_relaxed)) {
    if (Status same = compare(*rep, step, shape); !same.ok()) {
      if (same.code() != StatusCode::kCommFailed) {
        same = Status(
            StatusCode::kCommFailed,
            by_name(*rep) + ": " + step.text() + " could not be compared (TE_FL_VALIDATE)", same);
      }
      rep->inside.store(false, std::memory_order_release);
      fail_all(rep, same);
      return same;
    }
  }
  const std::lock_guard lock(rep->mutex);
  (shape.transfer ? rep->last_transfer : rep->last) = step;
  rep->running = true;
  rep->since = Clock::now();
  ticket = shape.transfer ? 2 : 1;
  return {};
}

Status failed_in(const Comm::Rep& rep, const Step& step, Status cause) {
  return Status(StatusCode::kCommFailed,
                by_name(rep) + ", rank " + std::to_string(rep.c.rank) + " of " +
                    std::to_string(rep.c.size) + ": " + step.text() + " failed",
                std::move(cause));
}

// The failure that another thread told before this call ended, for instance because another
// communicator of the process failed first. It need not say what the call was; from here on it
// does.
Status told_failure(Comm::Rep& rep, const Step& step) {
  const Status told = rep.failed_status();
  if (told.message().find(step.text()) != std::string::npos) return told;
  const std::lock_guard lock(rep.mutex);
  return rep.failure = failed_in(rep, step, told);
}

Status end(const CollectiveCall& call, uint64_t ticket, Status result) {
  if (ticket == 0) return result;
  const std::shared_ptr<Comm::Rep> rep = find(call.communicator.id);
  if (rep == nullptr) return result;
  // A failure of another rank is one for all, whatever of this call was done.
  const bool unheard = result.clean() && result.code() != StatusCode::kCommFailed;
  Step step;
  {
    const std::lock_guard lock(rep->mutex);
    Step& last = ticket == 2 ? rep->last_transfer : rep->last;
    step = last;
    rep->running = false;
    if (!result.ok() && unheard) --last.number;  // nothing of it reached the others
  }
  if (result.ok() && !wait_for_group(rep, call, step) && !call.capturing)
    mark_enqueued(*rep, call.stream, step);
  rep->inside.store(false, std::memory_order_release);
  if (result.ok() || unheard) return result;
  // The others wait for what this rank has not done or have done what it has not seen.
  if (rep->failed.load(std::memory_order_acquire)) return told_failure(*rep, step);
  fail_all(rep, failed_in(*rep, step, result));
  return result.code() == StatusCode::kCommFailed ? told_failure(*rep, step) : result;
}

constexpr core::CollectiveKeeper kKeeper{begin, end};

}  // namespace

std::string Step::text() const {
  std::string out =
      std::string(op == nullptr ? "nothing" : op) + " number " + std::to_string(number);
  if (rank < 0) return out;
  const int index = dtype_index(dtype);
  out += " of " +
         (index == kInvalidDType ? "?" : std::string(te_fl::name(static_cast<DType>(index)))) + "[";
  for (int i = 0; i < rank; ++i)
    out += (i == 0 ? "" : ",") + std::to_string(shape[static_cast<size_t>(i)]);
  return out + "]";
}

void mark_enqueued(Comm::Rep& rep, void* stream, const Step& step) {
  if (rep.device.is_host()) return;
  const std::lock_guard lock(rep.mutex);
  Mark& mark = rep.oldest.set ? rep.newest : rep.oldest;
  if (mark.event.get() == nullptr) {
    Result<Event> made = Event::create(rep.device);
    if (!made.ok()) return;
    mark.event = std::move(made).value();
  }
  if (!mark.event.record(stream).ok()) return;
  mark.step = step;
  mark.since = Clock::now();
  mark.set = true;
}

void watch_calls() { core::g_collective_keeper.store(&kKeeper, std::memory_order_release); }

}  // namespace te_fl::comm
