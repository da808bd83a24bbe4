#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "te_fl/op_manager.hpp"
#include "te_fl/status.hpp"
#include "te_fl/tensor.hpp"

// The log of a recomputed piece (te_fl/nn/autograd/recompute.hpp): its first run writes down what
// its forwards used, and the second reads that in the same order. So a forward calls each of these
// functions in both runs alike. They need replaying() or noting(), as their names say; owners are
// compared by address and never read.
namespace te_fl::nn::detail {

enum class Used : uint8_t { kScales, kDraw, kWeight, kParameter };

// One thing that the first run used.
struct RunEvent {
  Used used = Used::kScales;
  const void* owner = nullptr;
  int64_t count = 0;     // kDraw
  te_fl_rng rng{};       // kDraw
  Tensor tensor{};       // kScales, kWeight; kDraw: where the numbers start, if a tensor says that
  uint64_t version = 0;  // kParameter
  uint64_t capture = 0;  // of the first run
};
using RunLog = std::vector<RunEvent>;

// Makes the thread's forwards those of a first run, which writes `log`, or of a second one, which
// replays it. Scopes nest, and are destroyed in reverse order on the thread that made them. The log
// must outlive the scope.
class RunScope {
 public:
  RunScope(RunLog& log, bool replays);
  ~RunScope();
  RunScope(const RunScope&) = delete;
  RunScope& operator=(const RunScope&) = delete;
  // After a second run: FAILED_PRECONDITION names what the first used next, if it used more.
  Status complete() const;

  // The thread's innermost scope of a second run; null if there is none.
  static RunScope* replaying_run() noexcept;
  // Notes the event in the first runs that the thread is in, as far out as the next second run.
  static Status note(RunEvent event, const Device& device);
  // The first run's next event, which must be like this one; noted for the runs inside.
  static Result<const RunEvent*> replay(Used used, const void* owner, const Device& device);
  bool replays() const noexcept { return replays_; }
  std::unordered_map<const void*, Tensor>& scales() noexcept { return scales_; }

 private:
  RunLog& log_;
  const bool replays_;
  RunScope* outer_;
  size_t next_ = 0;  // event, of a second run
  std::unordered_map<const void*, Tensor> scales_;
};

// True inside of any scope.
bool running() noexcept;
// True if the thread's forwards repeat a first run.
bool replaying() noexcept;
// True if they have to write down what they use.
bool noting() noexcept;

// The FP8 scales of the state `owner`, when a forward begins to use it. replay_scales(): the copy
// that the first run made is in force from now on (replayed_scale()). note_scales() copies
// `scales`.
Status replay_scales(const void* owner, const Device& device);
Status note_scales(const void* owner, const Device& device, const Tensor& scales);
// The scale in force of the state's slot, F32 [1]; undefined if it is the state's own.
Result<Tensor> replayed_scale(const void* owner, int64_t slot);

// A draw of `count` random numbers: the first run's `options.rng`, or a note that it was made.
// `start`: the tensor that says where the numbers start, if there is one.
Status replay_draw(int64_t count, const Device& device, CallOptions& options);
Status note_draw(int64_t count, const Device& device, const CallOptions& options,
                 const Tensor& start);

// The weight that a linear map's first run read if its module keeps it, else undefined: it is made
// again then.
Result<Tensor> replay_weight(const void* owner, const Device& device);
Status note_weight(const void* owner, const Device& device, const Tensor& kept);

// The version that the parameter `owner` had in the first run.
Result<uint64_t> replay_version(const void* owner, const Device& device);
Status note_version(const void* owner, const Device& device, uint64_t version);

// FAILED_PRECONDITION: the second run is not the first's, for `reason`.
Status another_run(const std::string& reason);

}  // namespace te_fl::nn::detail
