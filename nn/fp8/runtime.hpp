#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "core/base/lock_level.hpp"
#include "policy/current.hpp"
#include "te_fl/nn/autograd/context.hpp"
#include "te_fl/nn/fp8/autocast.hpp"
#include "te_fl/nn/fp8/recipe.hpp"
#include "te_fl/status.hpp"
#include "te_fl/tensor.hpp"

// The scoped state behind Context and autocast, and what modules ask of it.
namespace te_fl::nn::detail {

class Fp8State;

// Numbers that are never used again, from 1.
uint64_t next_number() noexcept;

// FP8 state used since the last update, with the recipe and the FP8 type it was used with.
struct PendingUpdate {
  std::shared_ptr<Fp8State> state;
  DelayedScaling recipe;
  DType dtype = DType::kF8E4M3;
  std::shared_ptr<AmaxReduction> reduction = nullptr;
};

enum class Direction : uint8_t { kForward, kBackward };

// Each state once, in order of first use; a later use's recipe wins. Not thread-safe.
class PendingUpdates {
 public:
  void add(PendingUpdate update);
  // As add(), unless the state is there already.
  void add_new(PendingUpdate update);
  const std::vector<PendingUpdate>& all() const noexcept { return updates_; }
  std::vector<PendingUpdate> take() { return std::exchange(updates_, {}); }

 private:
  PendingUpdate* find(const Fp8State& state);
  std::vector<PendingUpdate> updates_;
};

// The sites that were used under an AmaxReduction, in the order of their first use. Thread-safe.
class ReducedSites {
 public:
  // Adds a site with its two states unless it is there.
  void add(const PendingUpdate& forward, const PendingUpdate& backward);
  // Without those that are retired.
  std::vector<PendingUpdate> all(Direction direction);

 private:
  const uint64_t number_ = next_number();
  core::Mutex mutex_{core::LockLevel::kReducedSites};
  std::vector<PendingUpdate> forward_, backward_;  // which do not keep the reduction
};

// The gradient scales that wait for the end of a step's backward. Each thread has one, which
// CapturedContext hands on. A forward notes the one of its thread, and its backward uses that,
// wherever it runs; the parameters whose gradients it writes know it, too, so that the optimizer
// ends a backward that nobody ended. Thread-safe.
class GradientUpdates {
 public:
  void add(PendingUpdate update);
  // For an error met where none can be returned: end() returns it.
  void defer(Status status);
  // Runs the updates. What had been deferred is the outcome, or else their error.
  Status end();
  // The pending updates, which are the caller's then; and puts them back.
  std::vector<PendingUpdate> take();
  void put_back(std::vector<PendingUpdate> updates);

 private:
  core::Mutex mutex_{core::LockLevel::kGradientUpdates};
  PendingUpdates pending_;
  Status deferred_;
};
// The calling thread's.
const std::shared_ptr<GradientUpdates>& current_gradient_updates();
// Makes `updates` the calling thread's; returns what was.
std::shared_ptr<GradientUpdates> exchange_gradient_updates(
    std::shared_ptr<GradientUpdates> updates);

// Shared by the copies of one Context.
struct RandomState {
  core::Mutex mutex{core::LockLevel::kRandomPosition};
  RandomPosition position;
  // While a graph is captured: U64 [2] {seed, offset} on its device, which stands for `captured_at`
  // at every launch.
  Tensor captured;
  uint64_t captured_at = 0;
};

// One outermost autocast with the scopes nested in it or entered from a capture of it.
struct Session {
  core::Mutex mutex{core::LockLevel::kFp8Session};
  int scopes = 0;
  bool trained = false;     // whether a forward in it was no inference
  bool calibrated = false;  // whether one calibrated
  PendingUpdates forward;
  std::vector<std::shared_ptr<AmaxReduction>> reductions;  // of its scopes
};

struct AutocastFrame {
  AutocastOptions options;
  std::shared_ptr<const Recipe> recipe;
  Status invalid;  // why the recipe cannot be used
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

// No policy scope of the calling thread, until destroyed.
class WithoutPolicyScope {
 public:
  WithoutPolicyScope() : previous_(std::exchange(policy::t_scope, 0)) {}
  ~WithoutPolicyScope() { policy::t_scope = previous_; }
  WithoutPolicyScope(const WithoutPolicyScope&) = delete;
  WithoutPolicyScope& operator=(const WithoutPolicyScope&) = delete;

 private:
  uint32_t previous_;
};

// Runs the delayed-scaling update of all of them, and of all sites of their reductions and of
// `reductions`: one op call per device, FP8 type, margin and algorithm.
Status update_scales(std::vector<PendingUpdate> updates, Direction direction,
                     std::vector<std::shared_ptr<AmaxReduction>> reductions = {});

// How a forward is to compute.
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
// Of the calling thread now; the innermost autocast's error if its recipe is invalid.
Result<Fp8Mode> current_mode();

// Prepares the delayed-scaling states of a site for a forward in `mode`, which uses them and
// collects amaxes; makes them if need be. The session updates the forward scales. An inference
// takes a history of another length as it is.
Status begin_delayed(const Fp8Mode& mode, bool training, const std::shared_ptr<Fp8State>& forward,
                     const std::shared_ptr<Fp8State>& backward);
// A backward of that forward is about to use the gradients' state.
Status begin_delayed_backward(const Fp8Mode& mode, const std::shared_ptr<Fp8State>& backward);

}  // namespace te_fl::nn::detail
