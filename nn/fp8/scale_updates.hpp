#pragma once

#include <memory>
#include <vector>

#include "core/base/lock_level.hpp"
#include "nn/fp8/pending_updates.hpp"
#include "te_fl/nn/fp8/amax_reduction.hpp"
#include "te_fl/status.hpp"

// Delayed scaling's update: scales from the amaxes that forwards and backwards have collected.
namespace te_fl::nn::detail {

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

// Leaves the forward scales of inferences to the thread's next update.
void wait_for_update(std::vector<PendingUpdate> updates);
// True if the state is among those that wait on this thread.
bool waits_here(Fp8State& state);

// Runs the delayed-scaling update of all of them, and of all sites of their reductions and of
// `reductions`: one op call per device, FP8 type, margin and algorithm.
Status update_scales(std::vector<PendingUpdate> updates, Direction direction,
                     std::vector<std::shared_ptr<AmaxReduction>> reductions = {});

}  // namespace te_fl::nn::detail
