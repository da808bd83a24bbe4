#include "nn/fp8/runtime.hpp"

#include <algorithm>
#include <atomic>
#include <iterator>
#include <span>

#include "nn/autograd/gradients.hpp"
#include "nn/autograd/recompute.hpp"
#include "nn/base/tensor_ops.hpp"
#include "nn/fp8/fp8_state.hpp"
#include "te_fl/log.hpp"

namespace te_fl::nn {
namespace detail {
namespace {

thread_local std::shared_ptr<AutocastFrame> tls_frame;

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

// One call of the op, which writes `scales` and rolls `histories`.
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

// Writes the scales that follow from the amaxes that the recipe's function has found.
Status scales_of_amaxes(const PendingUpdate& update, const Tensor& amax) {
  Fp8State& state = *update.state;
  const AmaxFunction& function = *update.recipe.amax_function;
  if (function.compute_scale != nullptr) {
    const float fp8_max = update.dtype == DType::kF8E4M3 ? 448.0f : 57344.0f;
    return function.compute_scale(amax, state.scale(), fp8_max)
        .wrap("amax_function \"" + function.name + "\": compute_scale");
  }
  TE_FL_ASSIGN_OR_RETURN(const Tensor row, amax.view({1, state.slots()}));  // a history of one row
  const te_fl_tensor* const rows[] = {row};
  const te_fl_tensor* const scales[] = {state.scale()};
  return run_update(update, rows, scales);
}

// The scales from what the recipe's functions find. The history is rolled beside scales that nobody
// reads.
Status update_by_function(const PendingUpdate& update) {
  Fp8State& state = *update.state;
  const AmaxFunction& function = *update.recipe.amax_function;
  TE_FL_ASSIGN_OR_RETURN(const bool foreign, in_foreign_capture(state.device()));
  TE_FL_ASSIGN_OR_RETURN(const Tensor amax,
                         Tensor::empty({state.slots()}, DType::kF32, state.device()));
  TE_FL_RETURN_IF_ERROR(
      function.compute(state.history(), amax).wrap("amax_function \"" + function.name + "\""));
  TE_FL_ASSIGN_OR_RETURN(const Tensor unread, state.scale().clone());
  const te_fl_tensor* const histories[] = {state.history()};
  const te_fl_tensor* const unread_scales[] = {unread};
  state.use(foreign);
  state.scales_changed();
  TE_FL_RETURN_IF_ERROR(scales_of_amaxes(update, amax));
  return run_update(update, histories, unread_scales);
}

// The updates that inferences left to the thread's next one.
struct Waiting {
  Fp8State::Weak state;
  PendingUpdate update;  // without its state
};
struct ThreadWaiting {
  const uint64_t number = next_number();
  std::vector<Waiting> updates;
};
ThreadWaiting& thread_waiting() {
  thread_local ThreadWaiting waiting;
  return waiting;
}

void wait_for_update(std::vector<PendingUpdate> updates) {
  ThreadWaiting& waiting = thread_waiting();
  for (PendingUpdate& update : updates) {
    if (update.state->waits_on().exchange(waiting.number) == waiting.number) continue;
    const std::shared_ptr<Fp8State> state = std::exchange(update.state, nullptr);
    waiting.updates.push_back({Fp8State::Weak(*state), std::move(update)});
  }
}

// Adds what waits to `updates`, but for devices that capture: an update in a graph is repeated.
Status add_waiting(PendingUpdates& updates) {
  ThreadWaiting& waiting = thread_waiting();
  for (Waiting& w : std::exchange(waiting.updates, {})) {
    w.update.state = w.state.lock();
    if (w.update.state == nullptr) continue;
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

// One call of `reduction` for each device, in the order of its first site.
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

// Makes the amaxes those of all ranks, and adds the sites that other ranks may have used.
Status reduce_all(PendingUpdates& updates, Direction direction,
                  std::vector<std::shared_ptr<AmaxReduction>> reductions) {
  for (const PendingUpdate& update : updates.all()) {
    if (update.reduction != nullptr &&
        std::ranges::find(reductions, update.reduction) == reductions.end()) {
      reductions.push_back(update.reduction);
    }
  }
  for (const std::shared_ptr<AmaxReduction>& reduction : reductions) {
    const std::vector<PendingUpdate> sites = reduction->sites().all(direction);
    bool captured = false;
    for (const PendingUpdate& site : sites) {
      TE_FL_ASSIGN_OR_RETURN(const bool here, capturing(site.state->device()));
      captured = captured || here;
    }
    if (captured) {  // a launch repeats what this step updates, and nothing of other steps
      std::vector<PendingUpdate> own;
      std::ranges::copy_if(updates.all(), std::back_inserter(own),
                           [&](const PendingUpdate& u) { return u.reduction == reduction; });
      TE_FL_RETURN_IF_ERROR(reduce_amaxes(*reduction, own));
      continue;
    }
    TE_FL_RETURN_IF_ERROR(reduce_amaxes(*reduction, sites));
    for (const PendingUpdate& site : sites) updates.add_new(site);
  }
  return {};
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

PendingUpdate* PendingUpdates::find(const Fp8State& state) {
  auto found = std::find_if(updates_.begin(), updates_.end(),
                            [&](const PendingUpdate& u) { return u.state->same(state); });
  return found == updates_.end() ? nullptr : &*found;
}

void PendingUpdates::add(PendingUpdate update) {
  if (PendingUpdate* found = find(*update.state)) {
    *found = std::move(update);
  } else {
    updates_.push_back(std::move(update));
  }
}

void PendingUpdates::add_new(PendingUpdate update) {
  if (find(*update.state) == nullptr) updates_.push_back(std::move(update));
}

void ReducedSites::add(const PendingUpdate& forward, const PendingUpdate& backward) {
  if (forward.state->reduced_by().exchange(number_) == number_) return;
  const std::lock_guard lock(mutex_);
  forward_.push_back({forward.state, forward.recipe, forward.dtype});
  backward_.push_back({backward.state, backward.recipe, backward.dtype});
}

std::vector<PendingUpdate> ReducedSites::all(Direction direction) {
  const std::lock_guard lock(mutex_);
  for (auto* sites : {&forward_, &backward_}) {
    std::erase_if(*sites, [](const PendingUpdate& site) { return site.state->retired(); });
  }
  return direction == Direction::kForward ? forward_ : backward_;
}

uint64_t next_number() noexcept {
  static std::atomic<uint64_t> last{0};
  return ++last;
}

void GradientUpdates::add(PendingUpdate update) {
  std::lock_guard lock(mutex_);
  update.state->set_pending(true);
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

Status update_scales(std::vector<PendingUpdate> given, Direction direction,
                     std::vector<std::shared_ptr<AmaxReduction>> reductions) {
  PendingUpdates all;
  for (PendingUpdate& update : given) all.add(std::move(update));
  if (direction == Direction::kForward) TE_FL_RETURN_IF_ERROR(add_waiting(all));
  TE_FL_RETURN_IF_ERROR(reduce_all(all, direction, std::move(reductions)));
  const std::vector<PendingUpdate>& updates = all.all();
  std::vector<bool> done(updates.size(), false);
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
  return {};
}

std::shared_ptr<AutocastFrame> current_frame() {
  // Scopes that another thread ended are left behind here.
  while (tls_frame != nullptr && tls_frame->ended.load(std::memory_order_acquire)) {
    tls_frame = std::shared_ptr<AutocastFrame>(std::move(tls_frame->previous));
  }
  return tls_frame;
}

void push_frame(const std::shared_ptr<AutocastFrame>& frame) {
  frame->previous = current_frame();
  {
    Session& session = *frame->session;
    std::lock_guard lock(session.mutex);
    ++session.scopes;
    const auto& reduction = frame->options.amax_reduction;
    if (reduction != nullptr &&
        std::ranges::find(session.reductions, reduction) == session.reductions.end()) {
      session.reductions.push_back(reduction);
    }
  }
  tls_frame = frame;
}

Status pop_frame(const std::shared_ptr<AutocastFrame>& frame, std::optional<bool> updates) {
  // The thread whose list has it, which need not be this one, drops it when it looks next; so
  // scopes may also end in another order than the reverse.
  frame->ended.store(true, std::memory_order_release);
  (void)current_frame();
  std::vector<PendingUpdate> pending;
  std::vector<std::shared_ptr<AmaxReduction>> reductions;
  {
    Session& session = *frame->session;
    std::lock_guard lock(session.mutex);
    if (--session.scopes > 0) return {};
    pending = session.forward.take();
    reductions = std::exchange(session.reductions, {});
    const bool trained = std::exchange(session.trained, false);
    updates = updates.value_or(trained) || std::exchange(session.calibrated, false);
  }
  if (*updates)
    return update_scales(std::move(pending), Direction::kForward, std::move(reductions));
  if (!pending.empty()) wait_for_update(std::move(pending));
  return {};
}

std::shared_ptr<AutocastFrame> frame_like(const std::shared_ptr<AutocastFrame>& captured) {
  auto frame = std::make_shared<AutocastFrame>();
  if (captured != nullptr) {
    frame->options = captured->options;
    frame->recipe = captured->recipe;
    frame->invalid = captured->invalid;
    frame->session = captured->session;
  } else {  // no autocast there means none here, whatever this thread has open
    frame->options = {.enabled = false};
    frame->recipe = std::make_shared<const Recipe>(DelayedScaling{});
    frame->session = std::make_shared<Session>();
  }
  return frame;
}

Result<Fp8Mode> current_mode() {
  const std::shared_ptr<AutocastFrame> frame = current_frame();
  Fp8Mode mode;
  if (frame == nullptr) return mode;
  TE_FL_RETURN_IF_ERROR(frame->invalid);
  mode.fp8 = frame->options.enabled;
  mode.calibrating = frame->options.calibrating && !frame->options.enabled;
  mode.recipe = frame->recipe;
  mode.session = frame->session;
  mode.gradients = current_gradient_updates();
  if (mode.fp8) mode.reduction = frame->options.amax_reduction;
  return mode;
}

namespace {

// begin_delayed() of a run that is not a second one.
Status begin_first(const Fp8Mode& mode, bool training, const std::shared_ptr<Fp8State>& forward,
                   const std::shared_ptr<Fp8State>& backward) {
  const DelayedScaling& recipe = *mode.delayed();
  TE_FL_ASSIGN_OR_RETURN(const bool foreign, in_foreign_capture(forward->device()));
  const bool infers = !training && !mode.calibrating;
  if (!infers || !forward->defined() || !backward->defined()) {
    TE_FL_RETURN_IF_ERROR(forward->ensure(recipe.amax_history_len));
    TE_FL_RETURN_IF_ERROR(backward->ensure(recipe.amax_history_len));
  }
  forward->use(foreign);
  if (!infers) backward->use(foreign);
  const PendingUpdate update{forward, recipe, fp8_dtype(*mode.recipe, Role::kInput),
                             mode.reduction};
  if (mode.reduction != nullptr) {
    mode.reduction->sites().add(update,
                                {backward, recipe, fp8_dtype(*mode.recipe, Role::kGradient)});
  } else if (infers && forward->waits_on() == thread_waiting().number) {
    return {};
  }
  std::lock_guard lock(mode.session->mutex);
  mode.session->trained = mode.session->trained || !infers;
  mode.session->calibrated = mode.session->calibrated || mode.calibrating;
  mode.session->forward.add(update);
  return {};
}

}  // namespace

Status begin_delayed(const Fp8Mode& mode, bool training, const std::shared_ptr<Fp8State>& forward,
                     const std::shared_ptr<Fp8State>& backward) {
  if (replaying()) return replay_scales(*forward);
  TE_FL_RETURN_IF_ERROR(begin_first(mode, training, forward, backward));
  return noting() ? note_scales(*forward) : Status();
}

Status begin_delayed_backward(const Fp8Mode& mode, const std::shared_ptr<Fp8State>& backward) {
  const DType dtype = fp8_dtype(*mode.recipe, Role::kGradient);
  TE_FL_RETURN_IF_ERROR(backward->retype(dtype));
  TE_FL_ASSIGN_OR_RETURN(const bool foreign, in_foreign_capture(backward->device()));
  backward->use(foreign);
  mode.gradients->add({backward, *mode.delayed(), dtype, mode.reduction});
  return {};
}

}  // namespace detail

namespace {

Status check_options(const AutocastOptions& options, const Recipe& recipe) {
  TE_FL_RETURN_IF_ERROR(validate(recipe));
  if (options.calibrating && !std::holds_alternative<DelayedScaling>(recipe)) {
    return invalid_argument(
        "autocast: calibrating collects amaxes for delayed scaling; " + describe(recipe) +
        " keeps no state to calibrate: use DelayedScaling or calibrating = false");
  }
  return {};
}

}  // namespace

autocast::autocast(AutocastOptions options, Recipe recipe)
    : frame_(std::make_shared<detail::AutocastFrame>()) {
  frame_->options = options;
  frame_->invalid = check_options(options, recipe);
  frame_->recipe = std::make_shared<const Recipe>(std::move(recipe));
  auto outer = detail::current_frame();
  frame_->session = outer != nullptr ? outer->session : std::make_shared<detail::Session>();
  detail::push_frame(frame_);
}

autocast::~autocast() {
  Status status = exit();
  if (status.ok()) return;
  log::error("autocast: " + status.to_string());
  detail::current_gradient_updates()->defer(status);
}

Status autocast::exit(std::optional<bool> updates) {
  if (frame_ == nullptr) return {};
  return detail::pop_frame(std::exchange(frame_, nullptr), updates);
}

AmaxReduction::AmaxReduction(Reduce reduce)
    : reduce_(std::move(reduce)), sites_(std::make_unique<detail::ReducedSites>()) {}
AmaxReduction::~AmaxReduction() = default;

bool fp8_enabled() {
  auto frame = detail::current_frame();
  return frame != nullptr && frame->options.enabled;
}

bool fp8_calibrating() {
  auto frame = detail::current_frame();
  return frame != nullptr && frame->options.calibrating && !frame->options.enabled;
}

std::optional<Recipe> current_recipe() {
  auto frame = detail::current_frame();
  if (frame == nullptr) return std::nullopt;
  return *frame->recipe;
}

Status backward_end() { return detail::current_gradient_updates()->end(); }

}  // namespace te_fl::nn
