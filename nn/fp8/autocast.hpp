#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <vector>

#include "core/base/lock_level.hpp"
#include "nn/fp8/scale_updates.hpp"
#include "te_fl/nn/fp8/autocast.hpp"
#include "te_fl/nn/fp8/recipe.hpp"
#include "te_fl/status.hpp"

// The state of autocast, and the queries of modules about it.
namespace te_fl::nn::detail {

// An outermost autocast, together with the scopes nested in it or entered from a capture of it.
struct Session {
  core::Mutex mutex{core::LockLevel::kFp8Session};
  int scopes = 0;
  bool trained = false;              // a forward of training or calibration has run
  bool calibrated = false;           // a forward has calibrated
  std::atomic<bool> failed = false;  // the last training forward of a module has failed
  PendingUpdates forward;
  std::vector<std::shared_ptr<AmaxReduction>> reductions;  // reductions of its scopes
};

struct AutocastFrame {
  AutocastOptions options;
  std::shared_ptr<const Recipe> recipe;
  Status invalid;  // the reason if the recipe is invalid
  std::shared_ptr<Session> session;
  std::shared_ptr<AutocastFrame> previous;
  std::atomic<bool> ended = false;
};

// Makes `frame` the thread's innermost frame and adds it to its session.
void push_frame(const std::shared_ptr<AutocastFrame>& frame);
// Ends a frame, on any thread. If it is the last frame of its session and `updates` (as in
// autocast::exit()) is true, updates the forward scales. If it is the last one and `updates` is
// false, defers the update to the thread's next one.
Status pop_frame(const std::shared_ptr<AutocastFrame>& frame,
                 std::optional<bool> updates = std::nullopt);
std::shared_ptr<AutocastFrame> current_frame();
// A frame with the options of `captured` (null: no autocast), for another thread or for a later
// run. It belongs to the session of `captured`, or to a new one if that is null.
std::shared_ptr<AutocastFrame> frame_like(const std::shared_ptr<AutocastFrame>& captured);

// Records whether a training forward of a module on this thread failed. A session whose last
// training forward failed does not change the scales.
void note_forward(bool failed) noexcept;

// The precision mode of a forward pass: FP8 or not, and the recipe.
struct Fp8Mode {
  bool fp8 = false;
  bool calibrating = false;
  std::shared_ptr<const Recipe> recipe;
  std::shared_ptr<Session> session;
  std::shared_ptr<GradientUpdates> gradients;
  std::shared_ptr<AmaxReduction> reduction;

  // The delayed-scaling recipe; null for other recipes.
  const DelayedScaling* delayed() const {
    return recipe == nullptr ? nullptr : std::get_if<DelayedScaling>(recipe.get());
  }
  // The custom recipe of an FP8 forward; null for other recipes and in high precision.
  const CustomScaling* custom() const {
    return fp8 ? std::get_if<CustomScaling>(recipe.get()) : nullptr;
  }
  BackwardOverride backward() const {
    return fp8 ? backward_override(*recipe) : BackwardOverride::kNone;
  }
  // True if the backward quantises the gradients.
  bool quantises_gradients() const { return fp8 && backward() == BackwardOverride::kNone; }
  // True if ops that produce an operand (norms, activations) write it quantised. MXFP8 operands
  // are quantised from values in the activation dtype, as in Transformer Engine.
  bool fuses() const {
    return !std::holds_alternative<MXFP8BlockScaling>(*recipe) &&
           !std::holds_alternative<CustomScaling>(*recipe);
  }
};
// The calling thread's mode; an error if the innermost autocast has an invalid recipe.
Result<Fp8Mode> current_mode();

// Prepares a module's delayed-scaling states for a forward in `mode`, which reads the scales and
// collects amaxes. Creates the states if necessary. The session will update the forward scales. For
// inference the states' history may have another length than the recipe's.
Status begin_delayed(const Fp8Mode& mode, bool training, const std::shared_ptr<Fp8State>& forward,
                     const std::shared_ptr<Fp8State>& backward);
// Prepares the gradients' state for the backward of a forward that ran in `mode`.
Status begin_delayed_backward(const Fp8Mode& mode, const std::shared_ptr<Fp8State>& backward);

}  // namespace te_fl::nn::detail
