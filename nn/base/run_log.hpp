#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "te_fl/op_manager.hpp"
#include "te_fl/status.hpp"
#include "te_fl/tensor.hpp"

// The log of an activation recomputation (te_fl/nn/autograd/recompute.hpp). The first run of the
// forwards records the inputs that they used; the second run reads them in the same order. A
// forward must therefore call these functions in the same order in both runs. The replay_ functions
// require replaying(), the note_ functions noting(). Owners are compared by address only.
namespace te_fl::nn::detail {

enum class Used : uint8_t { kScales, kDraw, kWeight, kParameter };

// One entry of the log: an input that the first run used.
struct RunEvent {
  Used used = Used::kScales;
  const void* owner = nullptr;
  int64_t count = 0;     // kDraw: count of random numbers
  te_fl_rng rng{};       // kDraw: RNG state of the call
  Tensor tensor{};       // kScales, kWeight; kDraw: the tensor with the start, if any
  uint64_t version = 0;  // kParameter: its version
  uint64_t capture = 0;  // the capture of the first run
};
using RunLog = std::vector<RunEvent>;

// Marks the thread's forwards as a first run, which writes `log`, or as a second run, which replays
// it. Scopes nest, and are destroyed in reverse order on the thread that created them. The log must
// outlive the scope.
class RunScope {
 public:
  RunScope(RunLog& log, bool replays);
  ~RunScope();
  RunScope(const RunScope&) = delete;
  RunScope& operator=(const RunScope&) = delete;
  // Must be called after a second run. FAILED_PRECONDITION, with the next unread entry, if the
  // first run used more inputs than the second.
  Status complete() const;

  // The thread's innermost scope of a second run; null: none.
  static RunScope* replaying_run() noexcept;
  // Appends the event to the logs of the thread's first runs, up to the innermost second run.
  static Status note(RunEvent event, const Device& device);
  // Returns the first run's next event, which must match the arguments. Also appends it to the logs
  // of nested first runs.
  static Result<const RunEvent*> replay(Used used, const void* owner, const Device& device);
  bool replays() const noexcept { return replays_; }
  std::unordered_map<const void*, Tensor>& scales() noexcept { return scales_; }

 private:
  RunLog& log_;
  const bool replays_;
  RunScope* outer_;
  size_t next_ = 0;  // index of the next event in a second run
  std::unordered_map<const void*, Tensor> scales_;
};

// True inside any RunScope.
bool running() noexcept;
// True if the thread's forwards are part of a second run.
bool replaying() noexcept;
// True if the thread's forwards must record their inputs.
bool noting() noexcept;

// The FP8 scales of the state `owner`, recorded when a forward begins to use the state.
// note_scales() stores a copy of `scales`; replay_scales() makes that copy effective
// (replayed_scale()).
Status replay_scales(const void* owner, const Device& device);
Status note_scales(const void* owner, const Device& device, const Tensor& scales);
// The replayed scale of the state's slot, F32 [1]; undefined if the state's own scale applies.
Result<Tensor> replayed_scale(const void* owner, int64_t slot);

// Log the reservation of `count` random numbers. replay_draw() sets `options.rng` to the RNG state
// of the first run; note_draw() records it. `start`: the tensor that defines where the numbers
// start, if any.
Status replay_draw(int64_t count, const Device& device, CallOptions& options);
Status note_draw(int64_t count, const Device& device, const CallOptions& options,
                 const Tensor& start);

// The quantised weight that the first run of a linear map read, if its module keeps it. Undefined
// otherwise; it is then quantised again.
Result<Tensor> replay_weight(const void* owner, const Device& device);
Status note_weight(const void* owner, const Device& device, const Tensor& kept);

// The version of the parameter `owner` in the first run.
Result<uint64_t> replay_version(const void* owner, const Device& device);
Status note_version(const void* owner, const Device& device, uint64_t version);

// The error FAILED_PRECONDITION that the second run differs from the first; `reason` gives the
// difference.
Status another_run(const std::string& reason);

}  // namespace te_fl::nn::detail
