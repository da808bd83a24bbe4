#pragma once

#include <memory>

#include "te_fl/export.hpp"
#include "te_fl/status.hpp"
#include "te_fl/tensor.hpp"

namespace te_fl::nn {

class AmaxReduction;

// Interface to the collectives of a framework's process group, for linear layers that are sharded
// among ranks. (A te_fl::Comm is used directly through TensorParallel::ranks.) Under sequence
// parallelism each rank has some of the rows of the activations. All ranks make the same calls in
// the same order. Tensors are compact and on one device; calls are ordered on the calling thread's
// current stream of that device. Calls may come from any thread, one at a time.
class TE_FL_API SequenceRanks {
 public:
  // A collective that has started. The tensors that were passed to it live until it ends.
  class TE_FL_API Work {
   public:
    Work() = default;
    Work(const Work&) = delete;
    Work& operator=(const Work&) = delete;
    // Waits as wait() does, unless wait() has been called.
    virtual ~Work();
    // Makes the current stream, or on the host the thread, wait for the collective. Called once.
    virtual Status wait() = 0;
  };
  // Null: the collective is already ordered on the current stream.
  using Begun = Result<std::unique_ptr<Work>>;

  SequenceRanks() = default;
  SequenceRanks(const SequenceRanks&) = delete;
  SequenceRanks& operator=(const SequenceRanks&) = delete;
  virtual ~SequenceRanks();
  virtual int size() const noexcept = 0;
  virtual int rank() const noexcept = 0;  // this process's rank, from 0
  // Concatenates the ranks' tensors `part` [n, ..] in `whole` [size * n, ..], in F32, F16, BF16 or
  // U8. `now`: the caller will wait immediately, so there is no other work to overlap with.
  virtual Begun all_gather(const Tensor& part, const Tensor& whole, bool now) = 0;
  // Sums the ranks' `whole` [size * n, ..] and writes this rank's rows of the sum to `part` [n,
  // ..]. `now` is as in all_gather().
  virtual Begun reduce_scatter(const Tensor& whole, const Tensor& part, bool now) = 0;
  // Minimum size in bytes of `part` from which a transfer can overlap with GEMMs at no cost. From
  // this size on, a layer splits its GEMM by rows: it computes this rank's rows while the other
  // ranks' rows are being gathered, or computes this rank's rows last before a reduce-scatter. 0:
  // never.
  virtual int64_t chunked_from() const noexcept { return 0; }
  // A reduce_scatter() whose input rows become available for one destination rank after the other.
  class TE_FL_API Chunks : public Work {
   public:
    // Reports that the rows for `rank` are complete on the current stream. Called once for each
    // rank, before wait().
    virtual Status rows_done(int rank) = 0;
  };
  // Called only if chunked_from() is not 0.
  virtual Result<std::unique_ptr<Chunks>> scatter_chunks(const Tensor& whole, const Tensor& part);
  // Replaces each element, F32, F16 or BF16, by its sum over the ranks. On return the current
  // stream is ordered after the collective.
  virtual Status sum(const Tensor& values) = 0;
  // Replaces each element of F32 [n] by its maximum over the ranks. On return the current stream is
  // ordered after the collective.
  virtual Status largest(const Tensor& values) = 0;
  // True if delayed scaling gives these ranks equal scales, because `reduction` combines the amaxes
  // of all of them. `reduction` is null if each rank uses its own amaxes.
  virtual bool share_amaxes(const AmaxReduction* reduction) const noexcept = 0;
};

}  // namespace te_fl::nn
