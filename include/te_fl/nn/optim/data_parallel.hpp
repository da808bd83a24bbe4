#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "te_fl/comm.hpp"
#include "te_fl/export.hpp"
#include "te_fl/nn/autograd/parameter.hpp"
#include "te_fl/status.hpp"
#include "te_fl/tensor.hpp"

namespace te_fl::nn {

namespace detail {
class GradientBuckets;
}

struct DataParallelOptions {
  int64_t bucket_bytes = 32 << 20;  // of gradients that one collective averages
  // ZeRO-1: the ranks divide what an optimizer keeps of the parameters, and its work. Each rank
  // gets the mean of its part of the gradients (reduce_scatter), updates that part of the
  // parameters, and gathers the others' (all_gather). The optimizer is to be created with
  // AdamOptions::zero. create() moves the values into flat memory.
  bool zero = false;
  // Collectives begin inside LastBackward, each when its bucket's last gradient is written. Absent:
  // on devices that have streams, where they run beside the backward on a stream of their own. On
  // the host a collective keeps the thread that calls it, so true gains nothing there; the results
  // are the same bits with and without.
  std::optional<bool> overlap = {};
};

// Ranks that have the same parameters, and each a part of the batch. The gradients lie in buckets
// of flat memory, which are averaged where they are.
//   for each microbatch but the last { forward; backward; }
//   forward;
//   { auto last = parallel->last_backward(); backward; }
//   sum_partial_gradients(...);  // if ranks divide the layers, too
//   parallel->average_gradients();
//   optimizer->step();
// A step begins with Module::zero_grad(), so that a parameter that a rank did not use counts as
// zero there. For one thread.
class TE_FL_API DataParallel {
 public:
  // Every rank calls it with the same parameters in the same order. Gives the parameters that are
  // not frozen their gradients (Parameter::give_grad()), zero. `ranks` null or of one rank: nothing
  // is done, here and later. FAILED_PRECONDITION with ZeRO for a parameter whose value is borrowed.
  static Result<std::unique_ptr<DataParallel>> create(const std::vector<NamedParameter>& parameters,
                                                      std::shared_ptr<const Comm> ranks,
                                                      const DataParallelOptions& options = {});
  ~DataParallel();
  DataParallel(const DataParallel&) = delete;
  DataParallel& operator=(const DataParallel&) = delete;

  // Lives around the last backward of a step, on its thread and stream: whatever writes a gradient
  // after its collective has begun is an error of average_gradients(). Its end orders the stream
  // after the collectives that have begun.
  class TE_FL_API [[nodiscard]] LastBackward {
   public:
    LastBackward(LastBackward&& other) noexcept;
    LastBackward& operator=(LastBackward&&) = delete;
    ~LastBackward();

   private:
    friend class DataParallel;
    explicit LastBackward(std::shared_ptr<detail::GradientBuckets> buckets);
    std::shared_ptr<detail::GradientBuckets> buckets_;
  };
  // Lets collectives begin in the backward that follows; a step works without it, too. The first
  // one only counts how often each gradient is written; they begin from the second step on. Every
  // rank uses it in the same steps, and its backwards write the same gradients as in the first.
  LastBackward last_backward();

  // The mean over the ranks of each gradient, with ZeRO of this rank's part: one collective a
  // bucket, those of the last parameters first, for buckets whose collective has not begun.
  // FAILED_PRECONDITION names a parameter whose gradient has been replaced, was not written since
  // clear_grad(), is left to Module::backward_dw(), or was written after its collective had begun;
  // or says that a LastBackward is alive, or with ZeRO that the gradients have been averaged before
  // and not cleared since.
  Status average_gradients();
  size_t buckets() const noexcept;

 private:
  friend class Adam;
  explicit DataParallel(std::shared_ptr<detail::GradientBuckets> buckets);
  std::shared_ptr<detail::GradientBuckets> buckets_;  // null: one rank
};

}  // namespace te_fl::nn
