#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "te_fl/export.hpp"
#include "te_fl/nn/autograd/ctx.hpp"
#include "te_fl/status.hpp"
#include "te_fl/tensor.hpp"

// Activation checkpointing (recomputation): a segment of a model, such as one layer, saves only its
// input, and its forward runs again in the backward pass.
namespace te_fl::nn {

namespace detail {
class RecomputeMemory;
struct RecomputeRun;
}  // namespace detail

// State that the first run of a checkpointed segment saves for the second run: the random numbers
// that it drew, the FP8 scales that it read, the quantised weights that its modules keep, the
// recipe and the policy. A handle: copies share the state. Only the scales are copied (4 bytes
// each).
class TE_FL_API RecomputeRecord {
 public:
  RecomputeRecord();
  ~RecomputeRecord();
  RecomputeRecord(const RecomputeRecord&);
  RecomputeRecord& operator=(const RecomputeRecord&);
  RecomputeRecord(RecomputeRecord&&) noexcept;
  RecomputeRecord& operator=(RecomputeRecord&&) noexcept;

 private:
  friend class RecomputeScope;
  std::shared_ptr<detail::RecomputeMemory> memory_;
};

enum class RecomputePhase : uint8_t { kNone, kFirst, kSecond };

// Marks this thread's forwards as the first or second run of a checkpointed segment until the scope
// is destroyed. It is for frameworks that have their own checkpointing; checkpoint() below uses it.
// Both runs call the same forwards in the same order and give each a Ctx. The first run drops its
// Ctxs.
//   kFirst: forwards compute and collect amaxes as usual; `record` stores what they used.
//   kSecond: forwards draw the same random numbers and read the same scales and weights. They
//     update nothing: no amax, no scale, no RNG state. Policy and autocast are those of the
//     first run, whatever scopes the thread has opened; streams are the thread's own. The scope
//     must end before the backward of the forwards that it covers. A record may be replayed several
//     times.
// FAILED_PRECONDITION if a forward of the second run differs from the first run, if a parameter was
// written in between, if the two runs were captured into different graphs, or if only one of them
// was captured. Scopes nest; destroy them in reverse order on the thread that made
// them.
class [[nodiscard]] TE_FL_API RecomputeScope {
 public:
  // `phase` must be kFirst or kSecond.
  RecomputeScope(const RecomputeRecord& record, RecomputePhase phase);
  ~RecomputeScope();
  RecomputeScope(const RecomputeScope&) = delete;
  RecomputeScope& operator=(const RecomputeScope&) = delete;

  // Call this at the end of a second run that should repeat the whole first run.
  // FAILED_PRECONDITION if the second run has not repeated every operation of the first run; the
  // message names the next one. OK in a first run.
  Status complete() const;

 private:
  std::unique_ptr<detail::RecomputeRun> run_;
};

// Returns the phase of the thread's innermost scope.
TE_FL_API RecomputePhase recompute_phase() noexcept;

// The result of running a segment: its output y, and a function that computes the input's gradient
// from y's gradient. The function may be called at most once; it keeps everything that the backward
// needs alive.
struct SegmentRun {
  Tensor y;
  std::function<Result<Tensor>(const Tensor& dy)> backward;
};
using Segment = std::function<Result<SegmentRun>(const Tensor& x)>;

// Runs the function `segment` on x and saves only x and a RecomputeRecord. SegmentRun::backward
// first runs `segment` again. Results, gradients, FP8 state and RNG state are bit for bit the same
// as without checkpointing. Everything that `segment` refers to must live until the backward, and
// `segment` must do the same work again. Calls nest.
//   auto run = nn::checkpoint([&](const Tensor& x) { return nn::run_segment(*layer, x); }, x);
TE_FL_API Result<SegmentRun> checkpoint(Segment segment, const Tensor& x);

// A segment that consists of one module: module.forward(x, ctx, args...) and its backward(dy, ctx).
// The module must outlive the result.
template <class Module, class... Args>
Result<SegmentRun> run_segment(Module& module, const Tensor& x, const Args&... args) {
  auto ctx = std::make_shared<Ctx>();
  TE_FL_ASSIGN_OR_RETURN(Tensor y, module.forward(x, ctx.get(), args...));
  return SegmentRun{std::move(y), [&module, ctx](const Tensor& dy) -> Result<Tensor> {
                      return module.backward(dy, *ctx);
                    }};
}

}  // namespace te_fl::nn
