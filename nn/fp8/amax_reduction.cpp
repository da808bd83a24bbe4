#include "te_fl/nn/fp8/amax_reduction.hpp"

#include <utility>

#include "nn/base/tensor_ops.hpp"
#include "nn/fp8/pending_updates.hpp"

namespace te_fl::nn {

AmaxReduction::AmaxReduction(Reduce reduce)
    : reduce_(std::move(reduce)), sites_(std::make_unique<detail::ReducedSites>()) {}
AmaxReduction::~AmaxReduction() = default;

namespace {

Status copy_between(const Tensor& flat, std::span<const Tensor> parts, bool to_flat) {
  int64_t begin = 0;
  for (const Tensor& part : parts) {
    TE_FL_ASSIGN_OR_RETURN(const Tensor slice, flat.slice(0, begin, begin + part.numel()));
    TE_FL_RETURN_IF_ERROR(to_flat ? detail::copy(part, slice) : detail::copy(slice, part));
    begin += part.numel();
  }
  return {};
}

Status reduce_over(const Comm& ranks, std::span<const Tensor> amaxes) {
  if (ranks.size() == 1 || amaxes.empty()) return {};
  int64_t total = 0;
  for (const Tensor& amax : amaxes) total += amax.numel();
  const Device device = amaxes.front().device();
  TE_FL_ASSIGN_OR_RETURN(const Tensor flat, Tensor::empty({total}, DType::kF32, device));
  TE_FL_RETURN_IF_ERROR(copy_between(flat, amaxes, true));
  te_fl_all_reduce_args args{};
  args.input = flat;
  args.output = flat;
  args.comm = ranks.c();
  args.reduction = TE_FL_REDUCTION_MAX;
  TE_FL_RETURN_IF_ERROR(ops::all_reduce(args, detail::call_options(device)));
  return copy_between(flat, amaxes, false);
}

}  // namespace

AmaxReduction::AmaxReduction(std::shared_ptr<const Comm> ranks)
    : AmaxReduction(
          [on = ranks.get()](std::span<const Tensor> amaxes) { return reduce_over(*on, amaxes); }) {
  ranks_ = std::move(ranks);
}

}  // namespace te_fl::nn
