#pragma once

#include <memory>
#include <vector>

#include "core/base/lock_level.hpp"
#include "nn/fp8/pending_updates.hpp"
#include "te_fl/nn/fp8/amax_reduction.hpp"
#include "te_fl/status.hpp"

// The update of delayed scaling: computes scales from the amaxes that forward and backward passes
// have collected.
namespace te_fl::nn::detail {

// The updates of gradient scales that are pending until a step's backward ends. Each thread has one
// list; CapturedContext passes it to other threads. A forward records the list of its thread, and
// its backward uses that list on any thread. The parameters whose gradients it writes refer to the
// list too, so that the optimizer can run the updates if the program did not. Thread-safe.
class GradientUpdates {
 public:
  void add(PendingUpdate update);
  // Stores an error from code that cannot return it; end() returns it.
  void defer(Status status);
  // Runs the updates. Returns the stored error, if any, otherwise the result of the updates.
  Status end();
  // take() removes and returns the pending updates; put_back() adds them again.
  std::vector<PendingUpdate> take();
  void put_back(std::vector<PendingUpdate> updates);
  // True if end() would neither update a scale nor return an error.
  bool empty() const;

 private:
  mutable core::Mutex mutex_{core::LockLevel::kGradientUpdates};
  PendingUpdates pending_;
  Status deferred_;
};
// The calling thread's list.
const std::shared_ptr<GradientUpdates>& current_gradient_updates();
// Sets the calling thread's list and returns the previous one.
std::shared_ptr<GradientUpdates> exchange_gradient_updates(
    std::shared_ptr<GradientUpdates> updates);

// Defers the forward-scale updates of inference passes to the thread's next update.
void wait_for_update(std::vector<PendingUpdate> updates);
// True if the state has a deferred update on this thread.
bool waits_here(Fp8State& state);

// Runs the delayed-scaling updates of all given states, and of all states of their reductions and
// of `reductions`. Uses one op call per device, FP8 type, margin and algorithm.
Status update_scales(std::vector<PendingUpdate> updates, Direction direction,
                     std::vector<std::shared_ptr<AmaxReduction>> reductions = {});

}  // namespace te_fl::nn::detail
