#include "nn/fp8/autocast.hpp"

#include <algorithm>
#include <new>
#include <utility>

#include "nn/base/capture.hpp"
#include "nn/base/run_log.hpp"
#include "nn/base/tensor_ops.hpp"
#include "te_fl/log.hpp"

namespace te_fl::nn {
namespace detail {
namespace {

thread_local std::shared_ptr<AutocastFrame> tls_frame;

}  // namespace

std::shared_ptr<AutocastFrame> current_frame() {
  // Drops scopes that another thread has ended.
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

void note_forward(bool failed) noexcept {
  if (tls_frame == nullptr) return;
  std::atomic<bool>& noted = tls_frame->session->failed;
  if (noted.load(std::memory_order_relaxed) != failed) noted = failed;
}

namespace {

// Discards the amaxes of a failed step, so that no later update uses them. Keeps the amaxes that
// inference passes had collected before the step.
Status drop_amaxes(const std::vector<PendingUpdate>& pending) {
  for (const PendingUpdate& update : pending) {
    Fp8State& state = *update.state;
    const bool waits = state.waits_on() != 0;
    if (!update.counts() || !state.defined() || (waits && !update.amaxes_before.defined()))
      continue;
    TE_FL_ASSIGN_OR_RETURN(const bool captured, capturing(state.device()));
    if (captured) continue;  // the capture has failed with the step
    TE_FL_RETURN_IF_ERROR(state.drop_amaxes());
    if (waits) TE_FL_RETURN_IF_ERROR(copy(update.amaxes_before, state.amaxes()));
  }
  return {};
}

}  // namespace

Status pop_frame(const std::shared_ptr<AutocastFrame>& frame, std::optional<bool> updates) {
  // Only marks the frame as ended. The thread whose list contains the frame, possibly another one,
  // removes it at its next call of current_frame(). Scopes may therefore end in any order.
  frame->ended.store(true, std::memory_order_release);
  (void)current_frame();
  std::vector<PendingUpdate> pending;
  std::vector<std::shared_ptr<AmaxReduction>> reductions;
  bool failed = false;
  {
    Session& session = *frame->session;
    std::lock_guard lock(session.mutex);
    if (--session.scopes > 0) return {};
    pending = session.forward.take();
    reductions = std::exchange(session.reductions, {});
    const bool trained = std::exchange(session.trained, false);
    const bool calibrated = std::exchange(session.calibrated, false);
    // Ranks that share amaxes must update together, even if this rank's step failed.
    failed = session.failed.exchange(false) && !updates.has_value() && reductions.empty();
    updates = updates.value_or(trained) || calibrated;
  }
  if (failed) return drop_amaxes(pending);
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
  } else {  // autocast is off here too, whatever this thread has open
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

// begin_delayed() except during the second run of an activation recomputation.
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
  PendingUpdate update{forward, recipe, fp8_dtype(*mode.recipe, Role::kInput), mode.reduction};
  if (mode.reduction != nullptr) {
    mode.reduction->sites().add(update,
                                {backward, recipe, fp8_dtype(*mode.recipe, Role::kGradient)});
  } else if (infers && waits_here(*forward)) {
    return {};
  }
  if (!infers && forward->waits_on() != 0) {
    TE_FL_ASSIGN_OR_RETURN(const bool captured, capturing(forward->device()));
    if (!captured) {
      TE_FL_ASSIGN_OR_RETURN(update.amaxes_before, forward->amaxes().clone());
    }
  }
  std::lock_guard lock(mode.session->mutex);
  mode.session->trained = mode.session->trained || !infers;
  mode.session->calibrated = mode.session->calibrated || mode.calibrating;
  mode.session->forward.add(std::move(update));
  return {};
}

}  // namespace

Status begin_delayed(const Fp8Mode& mode, bool training, const std::shared_ptr<Fp8State>& forward,
                     const std::shared_ptr<Fp8State>& backward) {
  if (replaying()) return replay_scales(forward.get(), forward->device());
  TE_FL_RETURN_IF_ERROR(begin_first(mode, training, forward, backward));
  return noting() ? note_scales(forward.get(), forward->device(), forward->scale()) : Status();
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

namespace {

Status exit_in_any_case(autocast& scope) {
  try {
    return scope.exit();
  } catch (const std::bad_alloc&) {
    return Status(StatusCode::kOutOfMemory,
                  "no host memory is left to update the scales at the end of an autocast");
  }
}

}  // namespace

autocast::~autocast() {
  try {
    const Status status = exit_in_any_case(*this);
    if (status.ok()) return;
    log::error("autocast: " + status.to_string());
    detail::current_gradient_updates()->defer(status);
  } catch (const std::bad_alloc&) {  // no memory for the error text either
  }
}

Status autocast::exit(std::optional<bool> updates) {
  if (frame_ == nullptr) return {};
  return detail::pop_frame(std::exchange(frame_, nullptr), updates);
}

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
