#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "te_fl/export.hpp"
#include "te_fl/nn/autograd/ctx.hpp"
#include "te_fl/status.hpp"
#include "te_fl/tensor.hpp"

// Recomputation: a piece of a model keeps its input alone, and runs again in the backward.
namespace te_fl::nn {

namespace detail {
class RecomputeMemory;
struct RecomputeRun;
}  // namespace detail

// Holds what the first run of a piece leaves for the second: the random numbers that it drew, the
// FP8 scales that it read, the quantised weights that its modules keep, the recipe and the policy.
// A handle: copies share it. Scales are copied (4 bytes each), nothing else is.
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

// Makes the forwards of this thread those of a piece's first or second run until destroyed, for
// frameworks that have a checkpoint of their own; checkpoint() below is made of it. Both runs call
// the same forwards in the same order and give each a Ctx, also the first, which drops them.
//   kFirst: the forwards compute and collect amaxes as ever; `record` notes what they used.
//   kSecond: they draw the same random numbers and read the same scales and weights, and collect
//     nothing: no amax, no scale update, no random position changes. The policy and the autocast
//     are the first run's, whatever the thread has open; the streams are the thread's own. Ends
//     before the backward of what it ran. A record may be replayed more than once.
// A forward of the second run that does not follow the first, a parameter that was written in
// between, and a run that was captured into another graph (or into none) are FAILED_PRECONDITION.
// Scopes nest, and are destroyed in reverse order on the thread that made them.
class [[nodiscard]] TE_FL_API RecomputeScope {
 public:
  // `phase` is not kNone.
  RecomputeScope(const RecomputeRecord& record, RecomputePhase phase);
  ~RecomputeScope();
  RecomputeScope(const RecomputeScope&) = delete;
  RecomputeScope& operator=(const RecomputeScope&) = delete;

  // At the end of a second run that was to repeat the whole first one: FAILED_PRECONDITION names
  // what the first run used next, if it used more. OK in a first run.
  Status complete() const;

 private:
  std::unique_ptr<detail::RecomputeRun> run_;
};

// Returns the phase of the thread's innermost scope.
TE_FL_API RecomputePhase recompute_phase() noexcept;

// A piece that has run: its result, and the function that takes the result's gradient to the
// input's, at most once. What the backward needs lives as long as the function.
struct PieceRun {
  Tensor y;
  std::function<Result<Tensor>(const Tensor& dy)> backward;
};
using Piece = std::function<Result<PieceRun>(const Tensor& x)>;

// Runs `piece` on x and keeps of it x and its recomputation record alone; the result's backward
// runs it again first. Results, gradients, FP8 state and random position are bit for bit those of
// the piece itself. The piece is called again, so what it refers to must live until then, and it
// must do the same. Pieces nest.
//   auto run = nn::checkpoint([&](const Tensor& x) { return nn::run_piece(*layer, x); }, x);
TE_FL_API Result<PieceRun> checkpoint(Piece piece, const Tensor& x);

// The piece that is one module: module.forward(x, ctx, args...), and its backward(dy, ctx). The
// module must outlive the result.
template <class Module, class... Args>
Result<PieceRun> run_piece(Module& module, const Tensor& x, const Args&... args) {
  auto ctx = std::make_shared<Ctx>();
  TE_FL_ASSIGN_OR_RETURN(Tensor y, module.forward(x, ctx.get(), args...));
  return PieceRun{std::move(y), [&module, ctx](const Tensor& dy) -> Result<Tensor> {
                    return module.backward(dy, *ctx);
                  }};
}

}  // namespace te_fl::nn
