#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "te_fl/nn/autocast.hpp"
#include "te_fl/nn/context.hpp"
#include "te_fl/nn/recipe.hpp"
#include "te_fl/status.hpp"
#include "te_fl/tensor.hpp"

// The scoped state behind Context and autocast, and what modules ask of it.
namespace te_fl::nn::detail {

class Fp8State;

// FP8 state used since the last update, with the recipe and the FP8 type it was used with.
struct PendingUpdate {
  std::shared_ptr<Fp8State> state;
  DelayedScaling recipe;
  DType dtype = DType::kF8E4M3;
};

// Each state once, in order of first use; a later use's recipe wins. Not thread-safe.
class PendingUpdates {
 public:
  void add(PendingUpdate update);
  std::vector<PendingUpdate> take();
  bool empty() const noexcept { return updates_.empty(); }

 private:
  std::vector<PendingUpdate> updates_;
};

// Shared by the copies of one Context.
struct StepState {
  std::mutex mutex;
  RandomPosition random;
  // While a graph is captured: U64 [2] {seed, offset} on its device, which stands for `captured_at`
  // at every launch.
  Tensor captured_random;
  uint64_t captured_at = 0;
  PendingUpdates backward;
  Status deferred;  // an error met where none can be returned; backward_end() returns it
};

// One outermost autocast with the scopes nested in it or entered from a capture of it.
struct Session {
  std::mutex mutex;
  int scopes = 0;
  PendingUpdates forward;
};

struct AutocastFrame {
  AutocastOptions options;
  std::shared_ptr<const Recipe> recipe;
  Status invalid;  // why the recipe cannot be used
  std::shared_ptr<Session> session;
  std::shared_ptr<AutocastFrame> previous;
};

// Makes `frame` the thread's innermost and counts it in its session.
void push_frame(const std::shared_ptr<AutocastFrame>& frame);
// Removes it again; updates the forward scales if it was its session's last.
Status pop_frame(const std::shared_ptr<AutocastFrame>& frame);
std::shared_ptr<AutocastFrame> current_frame();
// Runs the delayed-scaling update of all of them: one op call per FP8 type, margin and algorithm.
Status update_scales(const std::vector<PendingUpdate>& updates);

// How a forward is to compute.
struct Fp8Mode {
  bool fp8 = false;
  bool calibrating = false;
  std::shared_ptr<const Recipe> recipe;
  std::shared_ptr<Session> session;

  // The delayed-scaling recipe, or null.
  const DelayedScaling* delayed() const {
    return recipe == nullptr ? nullptr : std::get_if<DelayedScaling>(recipe.get());
  }
};
// Of the calling thread now; the innermost autocast's error if its recipe is invalid.
Result<Fp8Mode> current_mode();

}  // namespace te_fl::nn::detail
