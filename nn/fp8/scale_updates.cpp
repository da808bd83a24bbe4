#include "nn/fp8/scale_updates.hpp"

#include <algorithm>
#include <iterator>
#include <span>
#include <utility>

#include "nn/base/capture.hpp"
#include "nn/base/tensor_ops.hpp"

namespace te_fl::nn::detail {

namespace {

std::shared_ptr<GradientUpdates>& thread_updates() {
  thread_local auto updates = std::make_shared<GradientUpdates>();
  return updates;
}

bool same_group(const PendingUpdate& a, const PendingUpdate& b) {
  return a.recipe.amax_function == nullptr && b.recipe.amax_function == nullptr &&
         a.dtype == b.dtype && a.recipe.margin == b.recipe.margin &&
         a.recipe.amax_compute_algo == b.recipe.amax_compute_algo &&
         a.state->device() == b.state->device();
}

// Calls the update op once: it writes `scales` and rolls the `histories` that have new amaxes.
Status run_update(const PendingUpdate& like, std::span<const te_fl_tensor* const> histories,
                  std::span<const te_fl_tensor* const> scales) {
  te_fl_fused_amax_and_scale_update_after_reduction_args args{};
  args.amax_histories = histories.data();
  args.amax_histories_count = static_cast<int64_t>(histories.size());
  args.scales = scales.data();
  args.scales_count = static_cast<int64_t>(scales.size());
  args.algo = like.recipe.amax_compute_algo == AmaxAlgo::kMax ? TE_FL_AMAX_ALGO_MAX
                                                              : TE_FL_AMAX_ALGO_MOST_RECENT;
  args.fp8_dtype = like.dtype == DType::kF8E4M3 ? TE_FL_FP8_FORMAT_E4M3 : TE_FL_FP8_FORMAT_E5M2;
  args.margin = static_cast<float>(like.recipe.margin);
  return ops::fused_amax_and_scale_update_after_reduction(args, call_options(like.state->device()));
}

// Computes the scales from the amaxes that the recipe's function has returned.
Status scales_of_amaxes(const PendingUpdate& update, const Tensor& amax) {
  Fp8State& state = *update.state;
  const AmaxFunction& function = *update.recipe.amax_function;
  if (function.compute_scale != nullptr) {
    return function.compute_scale(amax, state.scale(), largest_finite(update.dtype))
        .wrap("amax_function \"" + function.name + "\": compute_scale");
  }
  TE_FL_ASSIGN_OR_RETURN(const Tensor row, amax.view({1, state.slots()}));  // a one-row history
  const te_fl_tensor* const rows[] = {row};
  const te_fl_tensor* const scales[] = {state.scale()};
  return run_update(update, rows, scales);
}

// Rolls the history by one row, even without new amaxes: an amax function of the program expects
// the rows as in Transformer Engine, which always rolls.
Status roll(const Tensor& history) {
  const int64_t length = history.size(0);
  TE_FL_ASSIGN_OR_RETURN(const Tensor running, history.slice(0, 0, 1));
  if (length > 1) {
    TE_FL_ASSIGN_OR_RETURN(const Tensor old, history.clone());
    TE_FL_ASSIGN_OR_RETURN(const Tensor kept, old.slice(0, 1, length));
    TE_FL_ASSIGN_OR_RETURN(const Tensor older, history.slice(0, 0, length - 1));
    TE_FL_RETURN_IF_ERROR(copy(kept, older));
    TE_FL_ASSIGN_OR_RETURN(const Tensor last, old.slice(0, 0, 1));
    TE_FL_ASSIGN_OR_RETURN(const Tensor newest, history.slice(0, length - 1, length));
    TE_FL_RETURN_IF_ERROR(copy(last, newest));
  }
  return fill(running, 0);
}

// Updates the scales by the recipe's own functions.
Status update_by_function(const PendingUpdate& update) {
  Fp8State& state = *update.state;
  const AmaxFunction& function = *update.recipe.amax_function;
  TE_FL_ASSIGN_OR_RETURN(const bool foreign, in_foreign_capture(state.device()));
  TE_FL_ASSIGN_OR_RETURN(const Tensor amax,
                         Tensor::empty({state.slots()}, DType::kF32, state.device()));
  TE_FL_RETURN_IF_ERROR(
      function.compute(state.history(), amax).wrap("amax_function \"" + function.name + "\""));
  state.use(foreign);
  state.scales_changed();
  TE_FL_RETURN_IF_ERROR(scales_of_amaxes(update, amax));
  return roll(state.history());
}

// An update for amaxes of inference passes, which is deferred to the thread's next update.
struct Waiting {
  Fp8State::Weak state;
  PendingUpdate update;  // with a null state
};
struct ThreadWaiting {
  const uint64_t number = next_number();
  std::vector<Waiting> updates;
};
ThreadWaiting& thread_waiting() {
  thread_local ThreadWaiting waiting;
  return waiting;
}

// Adds the deferred updates to `updates`, except for devices that are capturing, since each launch
// would repeat them.
Status add_waiting(PendingUpdates& updates) {
  ThreadWaiting& waiting = thread_waiting();
  for (Waiting& w : std::exchange(waiting.updates, {})) {
    w.update.state = w.state.lock();
    if (w.update.state == nullptr || !w.update.counts()) continue;
    TE_FL_ASSIGN_OR_RETURN(const bool captured, capturing(w.update.state->device()));
    if (captured) {
      w.update.state = nullptr;
      waiting.updates.push_back(std::move(w));
      continue;
    }
    w.update.state->waits_on() = 0;
    updates.add_new(std::move(w.update));
  }
  return {};
}

// Calls `reduction` once per device, in the order of the devices' first entries.
Status reduce_amaxes(const AmaxReduction& reduction, const std::vector<PendingUpdate>& updates) {
  std::vector<std::pair<Device, std::vector<Tensor>>> by_device;
  for (const PendingUpdate& update : updates) {
    const Device device = update.state->device();
    auto found = std::find_if(by_device.begin(), by_device.end(),
                              [&](const auto& d) { return d.first == device; });
    if (found == by_device.end()) found = by_device.insert(found, {device, {}});
    found->second.push_back(update.state->amaxes());
  }
  for (const auto& [device, amaxes] : by_device) {
    if (Status status = reduction.reduce(amaxes); !status) {
      return status.wrap("delayed scaling: the ranks' amaxes were not reduced");
    }
  }
  return {};
}

using Reductions = std::vector<std::shared_ptr<AmaxReduction>>;

// Reduces the amaxes over the reduction's ranks. Adds the states that other ranks may have used.
Status reduce_by(const std::shared_ptr<AmaxReduction>& reduction, PendingUpdates& updates,
                 Direction direction) {
  const std::vector<PendingUpdate> sites = reduction->sites().all(direction);
  bool captured = false;
  for (const PendingUpdate& site : sites) {
    TE_FL_ASSIGN_OR_RETURN(const bool here, capturing(site.state->device()));
    captured = captured || here;
  }
  if (captured) {  // launches repeat the updates of this step only
    std::vector<PendingUpdate> own;
    std::ranges::copy_if(updates.all(), std::back_inserter(own),
                         [&](const PendingUpdate& u) { return u.reduction == reduction; });
    return reduce_amaxes(*reduction, own);
  }
  TE_FL_RETURN_IF_ERROR(reduce_amaxes(*reduction, sites));
  for (const PendingUpdate& site : sites) updates.add_new(site);
  return {};
}

// Reduces the amaxes over the ranks of all reductions. Continues after a failure, so that ranks of
// other reductions do not hang, and returns the first error. `failed` receives the reductions whose
// states cannot be updated.
Status reduce_all(PendingUpdates& updates, Direction direction, Reductions reductions,
                  Reductions& failed) {
  for (const PendingUpdate& update : updates.all()) {
    if (update.reduction != nullptr &&
        std::ranges::find(reductions, update.reduction) == reductions.end()) {
      reductions.push_back(update.reduction);
    }
  }
  Status first;
  for (const std::shared_ptr<AmaxReduction>& reduction : reductions) {
    Status status = reduce_by(reduction, updates, direction);
    if (status.ok()) continue;
    failed.push_back(reduction);
    if (first.ok()) first = std::move(status);
  }
  return first;
}

Status update_group(const std::vector<const PendingUpdate*>& group) {
  if (group.front()->recipe.amax_function != nullptr) return update_by_function(*group.front());
  TE_FL_ASSIGN_OR_RETURN(const bool foreign, in_foreign_capture(group.front()->state->device()));
  std::vector<const te_fl_tensor*> histories;
  std::vector<const te_fl_tensor*> scales;
  for (const PendingUpdate* update : group) {
    histories.push_back(update->state->history());
    scales.push_back(update->state->scale());
    update->state->use(foreign);
    update->state->scales_changed();
  }
  return run_update(*group.front(), histories, scales);
}

}  // namespace

void wait_for_update(std::vector<PendingUpdate> updates) {
  ThreadWaiting& waiting = thread_waiting();
  std::erase_if(waiting.updates, [](const Waiting& w) {
    const auto state = w.state.lock();
    return state == nullptr || state->loads() != w.update.loads;
  });
  for (PendingUpdate& update : updates) {
    if (!update.counts()) continue;
    if (update.state->waits_on().exchange(waiting.number) == waiting.number) continue;
    const std::shared_ptr<Fp8State> state = std::exchange(update.state, nullptr);
    waiting.updates.push_back({Fp8State::Weak(*state), std::move(update)});
  }
}

bool waits_here(Fp8State& state) { return state.waits_on() == thread_waiting().number; }

void GradientUpdates::add(PendingUpdate update) {
  std::lock_guard lock(mutex_);
  if (update.counts()) update.state->set_pending(true);
  pending_.add(std::move(update));
}

void GradientUpdates::defer(Status status) {
  std::lock_guard lock(mutex_);
  deferred_ = std::move(status);
}

std::vector<PendingUpdate> GradientUpdates::take() {
  std::lock_guard lock(mutex_);
  std::vector<PendingUpdate> updates = pending_.take();
  for (const PendingUpdate& update : updates) update.state->set_pending(false);
  return updates;
}

void GradientUpdates::put_back(std::vector<PendingUpdate> updates) {
  for (PendingUpdate& update : updates) add(std::move(update));
}

bool GradientUpdates::empty() const {
  std::lock_guard lock(mutex_);
  return pending_.all().empty() && deferred_.ok();
}

Status GradientUpdates::end() {
  Status deferred;
  {
    std::lock_guard lock(mutex_);
    deferred = std::exchange(deferred_, Status());
  }
  Status status = update_scales(take(), Direction::kBackward);
  return deferred.ok() ? status : deferred;
}

const std::shared_ptr<GradientUpdates>& current_gradient_updates() { return thread_updates(); }

std::shared_ptr<GradientUpdates> exchange_gradient_updates(
    std::shared_ptr<GradientUpdates> updates) {
  return std::exchange(thread_updates(), std::move(updates));
}

Status update_scales(std::vector<PendingUpdate> pending, Direction direction,
                     Reductions reductions) {
  PendingUpdates all;
  for (PendingUpdate& update : pending) {
    if (update.counts()) all.add(std::move(update));
  }
  if (direction == Direction::kForward) TE_FL_RETURN_IF_ERROR(add_waiting(all));
  Reductions failed;
  const Status reduced = reduce_all(all, direction, std::move(reductions), failed);
  const std::vector<PendingUpdate>& updates = all.all();
  std::vector<bool> done(updates.size(), false);
  for (size_t i = 0; i < updates.size() && !failed.empty(); ++i) {
    done[i] = std::ranges::find(failed, updates[i].reduction) != failed.end();
  }
  for (size_t i = 0; i < updates.size(); ++i) {
    if (done[i] || !updates[i].state->defined()) continue;
    std::vector<const PendingUpdate*> group = {&updates[i]};
    for (size_t j = i + 1; j < updates.size(); ++j) {
      if (done[j] || !updates[j].state->defined() || !same_group(updates[i], updates[j])) continue;
      group.push_back(&updates[j]);
      done[j] = true;
    }
    if (Status status = update_group(group); !status) {
      return status.wrap("delayed scaling: the scale update failed");
    }
  }
  return reduced;
}

}  // namespace te_fl::nn::detail
