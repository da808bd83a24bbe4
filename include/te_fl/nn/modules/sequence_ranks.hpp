#pragma once

#include <memory>

#include "te_fl/export.hpp"
#include "te_fl/status.hpp"
#include "te_fl/tensor.hpp"

namespace te_fl::nn {

class AmaxReduction;

// The ranks that divide layers, as linear maps need them: under sequence parallelism they have
// parts of the rows of activations. Derived classes serve a framework's process groups; a
// te_fl::Comm needs none (TensorParallel::ranks). All ranks make the same calls in the same order.
// Tensors are compact and lie on one device; calls are ordered on the calling thread's current
// stream of it. Calls come from any thread, one at a time.
class TE_FL_API SequenceRanks {
 public:
  // A collective that has begun. The tensors that it was given live until it ends.
  class TE_FL_API Work {
   public:
    Work() = default;
    Work(const Work&) = delete;
    Work& operator=(const Work&) = delete;
    // Ends it as wait() does, if that was not called.
    virtual ~Work();
    // The current stream, or on a host the thread, goes on after it. Once.
    virtual Status wait() = 0;
  };
  // A null Work: the current stream has the collective already.
  using Begun = Result<std::unique_ptr<Work>>;

  SequenceRanks() = default;
  SequenceRanks(const SequenceRanks&) = delete;
  SequenceRanks& operator=(const SequenceRanks&) = delete;
  virtual ~SequenceRanks();
  virtual int size() const noexcept = 0;
  virtual int rank() const noexcept = 0;  // this one's, from 0
  // whole [size * n, ..] <- the ranks' parts [n, ..], one behind the other; F32, F16, BF16 or U8.
  // now: the caller waits at once, so nothing is gained by what lets other work run beside it.
  virtual Begun all_gather(const Tensor& part, const Tensor& whole, bool now) = 0;
  // part [n, ..] <- this rank's rows of the sum of the ranks' `whole` [size * n, ..]; now as above.
  virtual Begun reduce_scatter(const Tensor& whole, const Tensor& part, bool now) = 0;
  // Parts of at least so many bytes travel beside products and cost them nothing, so products of
  // all ranks' rows are computed in pieces: this rank's rows while the others' are gathered, and
  // last where each rank gets its rows of the sum. 0: there is no such size.
  virtual int64_t pieces_from() const noexcept { return 0; }
  // A reduce_scatter() of rows that are written one rank's after the other's.
  class TE_FL_API Pieces : public Work {
   public:
    // The current stream has the rows of that rank. Of each rank once, before wait().
    virtual Status rows_done(int rank) = 0;
  };
  // Asked for where pieces_from() is not 0 alone.
  virtual Result<std::unique_ptr<Pieces>> scatter_pieces(const Tensor& whole, const Tensor& part);
  // Each value, F32, F16 or BF16, becomes the sum of the ranks'; the stream has it on return.
  virtual Status sum(const Tensor& values) = 0;
  // Each value of F32 [n] becomes the largest that any rank has; the stream has it on return.
  virtual Status largest(const Tensor& values) = 0;
  // True if delayed scaling gives these ranks the same scales, as it takes the amaxes of all of
  // them: by `reduction`, which is null where amaxes stay with their rank.
  virtual bool share_amaxes(const AmaxReduction* reduction) const noexcept = 0;
};

}  // namespace te_fl::nn
