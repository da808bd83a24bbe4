#include "te_fl/nn/optim/data_parallel.hpp"

#include <string>
#include <utility>

#include "nn/optim/gradient_buckets.hpp"

namespace te_fl::nn {

Result<std::unique_ptr<DataParallel>> DataParallel::create(
    const std::vector<NamedParameter>& parameters, std::shared_ptr<const Comm> ranks,
    const DataParallelOptions& options) {
  if (options.bucket_bytes < 1) {
    return invalid_argument("DataParallel: bucket_bytes is " +
                            std::to_string(options.bucket_bytes) + "; it must be at least 1");
  }
  std::shared_ptr<detail::GradientBuckets> buckets;
  if (ranks != nullptr && ranks->size() > 1) {
    TE_FL_ASSIGN_OR_RETURN(
        buckets, detail::GradientBuckets::create(parameters, std::move(ranks), options.bucket_bytes,
                                                 options.zero, options.overlap));
  }
  return std::unique_ptr<DataParallel>(new DataParallel(std::move(buckets)));
}

DataParallel::DataParallel(std::shared_ptr<detail::GradientBuckets> buckets)
    : buckets_(std::move(buckets)) {}
DataParallel::~DataParallel() = default;

DataParallel::LastBackward DataParallel::last_backward() { return LastBackward(buckets_); }

Status DataParallel::average_gradients() {
  return buckets_ == nullptr ? Status() : buckets_->average();
}

size_t DataParallel::buckets() const noexcept {
  return buckets_ == nullptr ? 0 : buckets_->count();
}

DataParallel::LastBackward::LastBackward(std::shared_ptr<detail::GradientBuckets> buckets)
    : buckets_(std::move(buckets)) {
  if (buckets_ != nullptr) buckets_->open();
}

DataParallel::LastBackward::LastBackward(LastBackward&& other) noexcept
    : buckets_(std::move(other.buckets_)) {}

DataParallel::LastBackward::~LastBackward() {
  if (buckets_ != nullptr) buckets_->close();
}

}  // namespace te_fl::nn
