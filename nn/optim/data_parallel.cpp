#include "te_fl/nn/optim/data_parallel.hpp"

#include <string>
#include <utility>

#include "nn/autograd/parameter.hpp"
#include "nn/base/tensor_ops.hpp"

namespace te_fl::nn {
namespace {

constexpr int64_t kAlignment = 64;  // elements, so that every gradient is aligned as one of its own

int64_t padded(const Parameter& parameter) {
  return (parameter.value.numel() + kAlignment - 1) / kAlignment * kAlignment;
}

bool goes_with(const NamedParameter& a, const NamedParameter& b) {
  return a.parameter->grad_dtype == b.parameter->grad_dtype &&
         a.value().device() == b.value().device();
}

}  // namespace

Result<std::unique_ptr<DataParallel>> DataParallel::create(
    const std::vector<NamedParameter>& parameters, std::shared_ptr<const Comm> ranks,
    const DataParallelOptions& options) {
  if (options.bucket_bytes < 1) {
    return invalid_argument("DataParallel: bucket_bytes is " +
                            std::to_string(options.bucket_bytes) + "; it must be at least 1");
  }
  std::unique_ptr<DataParallel> parallel(new DataParallel(std::move(ranks)));
  if (parallel->ranks_ == nullptr || parallel->ranks_->size() == 1) return parallel;
  std::vector<NamedParameter> bucket;
  int64_t bytes = 0;
  for (const NamedParameter& p : parameters) {
    if (!p.parameter->requires_grad) continue;
    const int64_t own = bytes_for(p.parameter->grad_dtype, padded(*p.parameter));
    if (!bucket.empty() && (bytes + own > options.bucket_bytes || !goes_with(bucket.front(), p))) {
      TE_FL_RETURN_IF_ERROR(parallel->add_bucket(std::exchange(bucket, {})));
      bytes = 0;
    }
    bucket.push_back(p);
    bytes += own;
  }
  if (!bucket.empty()) TE_FL_RETURN_IF_ERROR(parallel->add_bucket(std::move(bucket)));
  return parallel;
}

Status DataParallel::add_bucket(std::vector<NamedParameter> parameters) {
  int64_t total = 0;
  for (const NamedParameter& p : parameters) total += padded(*p.parameter);
  const NamedParameter& like = parameters.front();
  Bucket bucket;
  TE_FL_ASSIGN_OR_RETURN(bucket.flat,
                         Tensor::zeros({total}, like.parameter->grad_dtype, like.value().device()));
  int64_t begin = 0;
  for (const NamedParameter& p : parameters) {
    const int64_t count = p.value().numel();
    TE_FL_ASSIGN_OR_RETURN(const Tensor slice, bucket.flat.slice(0, begin, begin + count));
    TE_FL_ASSIGN_OR_RETURN(Tensor grad, slice.view(p.value().shape()));
    bucket.places.push_back(grad.raw_data());
    TE_FL_RETURN_IF_ERROR(p.parameter->give_grad(std::move(grad), true).wrap(p.name));
    begin += padded(*p.parameter);
  }
  bucket.parameters = std::move(parameters);
  buckets_.push_back(std::move(bucket));
  return {};
}

Status DataParallel::average_gradients() const {
  for (const Bucket& bucket : buckets_) {
    for (size_t i = 0; i < bucket.parameters.size(); ++i) {
      const NamedParameter& p = bucket.parameters[i];
      if (p.grad().raw_data() == bucket.places[i] && !p.parameter->internals().grad_stale) continue;
      return failed_precondition("DataParallel: the gradient of " + p.name +
                                 (p.grad().raw_data() == bucket.places[i]
                                      ? " was cleared by clear_grad() and not written since; use "
                                        "Module::zero_grad(), which "
                                        "makes it zero"
                                      : " is not in its bucket any more: it was taken, replaced or "
                                        "dropped; create another "
                                        "DataParallel after that"));
    }
  }
  for (const Bucket& bucket : buckets_) {
    te_fl_all_reduce_args args{};
    args.input = bucket.flat;
    args.output = bucket.flat;
    args.comm = ranks_->c();
    args.reduction = TE_FL_REDUCTION_AVG;
    TE_FL_RETURN_IF_ERROR(ops::all_reduce(args, detail::call_options(bucket.flat.device())));
  }
  return {};
}

}  // namespace te_fl::nn
