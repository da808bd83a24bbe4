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

// The state behind autocast, and what modules ask of it.
namespace te_fl::nn::detail {

// One outermost autocast with the scopes nested in it or entered from a capture of it.
struct Session {
  core::Mutex mutex{core::LockLevel::kFp8Session};
  int scopes = 0;
  bool trained = false;     // a forward in it was no inference
  bool calibrated = false;  // a forward in it calibrated
  std::atomic<bool> failed =
      false;  // the last module's forward that trained did not come to its end
  PendingUpdates forward;
  std::vector<std::shared_ptr<AmaxReduction>> reductions;  // of its scopes
};

struct AutocastFrame {
  AutocastOptions options;
  std::shared_ptr<const Recipe> recipe;
  Status invalid;  // says why the recipe cannot be used
  std::shared_ptr<Session> session;
  std::shared_ptr<AutocastFrame> previous;
  std::atomic<bool> ended = false;
};

// Makes `frame` the thread's innermost and counts it in its session.
void push_frame(const std::shared_ptr<AutocastFrame>& frame);
// Ends it, on whatever thread. If it was its session's last, updates the forward scales, if
// `updates` as autocast::exit() has it; else they wait for the thread's next update.
Status pop_frame(const std::shared_ptr<AutocastFrame>& frame,
                 std::optional<bool> updates = std::nullopt);
std::shared_ptr<AutocastFrame> current_frame();
// A frame for another thread or a later time that does what `captured` does (null: no autocast) and
// counts in its session.
std::shared_ptr<AutocastFrame> frame_like(const std::shared_ptr<AutocastFrame>& captured);

// A module's forward that trained came to its end, or failed, on this thread: a session whose last
// one failed leaves the scales alone.
void note_forward(bool failed) noexcept;

// Says how a forward is to compute.
struct Fp8Mode {
  bool fp8 = false;
  bool calibrating = false;
  std::shared_ptr<const Recipe> recipe;
  std::shared_ptr<Session> session;
  std::shared_ptr<GradientUpdates> gradients;
  std::shared_ptr<AmaxReduction> reduction;

  // The delayed-scaling recipe, or null.
  const DelayedScaling* delayed() const {
    return recipe == nullptr ? nullptr : std::get_if<DelayedScaling>(recipe.get());
  }
};
// Returns the calling thread's mode; the innermost autocast's error if its recipe is invalid.
Result<Fp8Mode> current_mode();

// Prepares the delayed-scaling states of a site for a forward in `mode`, which uses them and
// collects amaxes; makes them if need be. The session updates the forward scales. An inference
// takes a history of another length as it is.
Status begin_delayed(const Fp8Mode& mode, bool training, const std::shared_ptr<Fp8State>& forward,
                     const std::shared_ptr<Fp8State>& backward);
// A backward of that forward is about to use the gradients' state.
Status begin_delayed_backward(const Fp8Mode& mode, const std::shared_ptr<Fp8State>& backward);

}  // namespace te_fl::nn::detail
