#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "te_fl/comm.hpp"
#include "te_fl/export.hpp"
#include "te_fl/nn/autograd/parameter.hpp"
#include "te_fl/status.hpp"
#include "te_fl/tensor.hpp"

namespace te_fl::nn {

struct DataParallelOptions {
  int64_t bucket_bytes = 32 << 20;  // of gradients that one collective averages
};

// Ranks that have the same parameters, and each a part of the batch. The gradients lie in buckets
// of flat memory, which are averaged where they are.
//   parallel->average_gradients();  // after the step's last backward
//   optimizer->step();
// A step begins with Module::zero_grad(), so that a parameter that a rank did not use counts as
// zero there. For one thread.
class TE_FL_API DataParallel {
 public:
  // Every rank calls it with the same parameters in the same order. Gives the parameters that are
  // not frozen their gradients (Parameter::give_grad()), zero. `ranks` null or of one rank: nothing
  // is done, here and later.
  static Result<std::unique_ptr<DataParallel>> create(const std::vector<NamedParameter>& parameters,
                                                      std::shared_ptr<const Comm> ranks,
                                                      const DataParallelOptions& options = {});
  // The mean over the ranks of each gradient: one collective a bucket, in the order of the
  // parameters. FAILED_PRECONDITION names a parameter whose gradient has been replaced or was not
  // written since clear_grad().
  Status average_gradients() const;
  size_t buckets() const noexcept { return buckets_.size(); }

 private:
  struct Bucket {
    Tensor flat;
    std::vector<NamedParameter> parameters;
    std::vector<const void*> places;  // of their gradients
  };
  explicit DataParallel(std::shared_ptr<const Comm> ranks) : ranks_(std::move(ranks)) {}
  Status add_bucket(std::vector<NamedParameter> parameters);

  std::shared_ptr<const Comm> ranks_;
  std::vector<Bucket> buckets_;
};

}  // namespace te_fl::nn
