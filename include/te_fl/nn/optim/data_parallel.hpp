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
  int64_t bucket_bytes = 32 << 20;  // bytes of gradients that one collective averages
  // ZeRO-1: the optimizer state and the update are sharded among the ranks. Each rank gets the mean
  // of its shard of the gradients (reduce_scatter), updates that shard of the parameters, and
  // gathers the other shards (all_gather). Create the optimizer with AdamOptions::zero.
  // DataParallel::create() moves the parameters' values into flat memory.
  bool zero = false;
  // True: collectives start during LastBackward, each as soon as the last gradient of its bucket
  // has been written. Unset: true on devices with streams, where collectives run on a stream of
  // their own, in parallel with the backward. On the host a collective blocks the calling thread,
  // so overlap gains nothing there. The results are bitwise the same either way.
  std::optional<bool> overlap = {};
};

// Data parallelism: the ranks have the same parameters, and each has a part of the batch. Gradients
// are stored in buckets of flat memory and averaged in place.
//   for each microbatch but the last { forward; backward; }
//   forward;
//   { auto last = parallel->last_backward(); backward; }
//   sum_partial_gradients(...);  // if the layers are tensor-parallel, too
//   parallel->average_gradients();
//   optimizer->step();
// Begin each step with Module::zero_grad(), so that a parameter that a rank did not use has a zero
// gradient there. For use by one thread.
class TE_FL_API DataParallel {
 public:
  // Called by every rank with the same parameters in the same order. Gives each parameter that is
  // not frozen a zero gradient in a bucket (Parameter::give_grad()). If `ranks` is null or has one
  // rank, this and all later calls do nothing. With ZeRO, FAILED_PRECONDITION for a parameter whose
  // value is borrowed.
  static Result<std::unique_ptr<DataParallel>> create(const std::vector<NamedParameter>& parameters,
                                                      std::shared_ptr<const Comm> ranks,
                                                      const DataParallelOptions& options = {});
  ~DataParallel();
  DataParallel(const DataParallel&) = delete;
  DataParallel& operator=(const DataParallel&) = delete;

  // Scope around the last backward of a step, on the backward's thread and stream. If anything
  // writes a gradient after its collective has started, average_gradients() returns an error. The
  // destructor makes the stream wait for the collectives that have started.
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
  // Allows collectives to start during the backward that follows. A step without this scope also
  // works. In the first scope te-fl only counts how often each gradient is written; collectives
  // start early from the second scope on. Every rank must use the scope in the same steps, and its
  // backwards must write the same gradients as the first time.
  LastBackward last_backward();

  // Averages each gradient over the ranks; with ZeRO, only this rank's shard of it. Runs one
  // collective for each bucket whose collective has not started yet, beginning with the last
  // parameters. FAILED_PRECONDITION names a parameter whose gradient was replaced, was not written
  // since clear_grad(), is deferred to Module::backward_dw(), or was written after its collective
  // had started. FAILED_PRECONDITION also while a LastBackward is alive and, with ZeRO, if the
  // gradients were averaged before and not cleared since.
  Status average_gradients();
  size_t buckets() const noexcept;

 private:
  friend class Adam;
  explicit DataParallel(std::shared_ptr<detail::GradientBuckets> buckets);
  std::shared_ptr<detail::GradientBuckets> buckets_;  // null for one rank
};

}  // namespace te_fl::nn
