#include "te_fl/nn/fp8/amax_reduction.hpp"

#include <utility>
#include <vector>

#include "nn/base/tensor_ops.hpp"
#include "nn/fp8/pending_updates.hpp"

namespace te_fl::nn {

AmaxReduction::AmaxReduction(Reduce reduce)
    : reduce_(std::move(reduce)), sites_(std::make_unique<detail::ReducedSites>()) {}
AmaxReduction::~AmaxReduction() = default;

namespace {

// Copies lists of tensors with one call: the list-scaling op with a factor of 1. Its flag for
// non-finite values is ignored, since such values are copied unchanged.
Status copy_lists(const std::vector<const te_fl_tensor*>& from,
                  const std::vector<const te_fl_tensor*>& to, const Tensor& flag) {
  te_fl_multi_tensor_scale_args args{};
  args.inputs = from.data();
  args.outputs = to.data();
  args.inputs_count = args.outputs_count = static_cast<int64_t>(from.size());
  args.noop_flag = flag;
  return ops::multi_tensor_scale(args, detail::call_options(flag.device()));
}

Status reduce_over(const Comm& ranks, std::span<const Tensor> amaxes) {
  if (ranks.size() == 1 || amaxes.empty()) return {};
  int64_t total = 0;
  for (const Tensor& amax : amaxes) total += amax.numel();
  const Device device = amaxes.front().device();
  TE_FL_ASSIGN_OR_RETURN(const Tensor flat, Tensor::empty({total}, DType::kF32, device));
  TE_FL_ASSIGN_OR_RETURN(const Tensor flag, Tensor::empty({1}, DType::kI32, device));
  std::vector<Tensor> slices;
  std::vector<const te_fl_tensor*> parts, places;
  slices.reserve(amaxes.size());
  for (int64_t begin = 0; const Tensor& amax : amaxes) {
    TE_FL_ASSIGN_OR_RETURN(Tensor slice, flat.slice(0, begin, begin + amax.numel()));
    parts.push_back(amax);
    places.push_back(slices.emplace_back(std::move(slice)));
    begin += amax.numel();
  }
  TE_FL_RETURN_IF_ERROR(copy_lists(parts, places, flag));
  te_fl_all_reduce_args args{};
  args.input = flat;
  args.output = flat;
  args.comm = ranks.c();
  args.reduction = TE_FL_REDUCTION_MAX;
  TE_FL_RETURN_IF_ERROR(ops::all_reduce(args, detail::call_options(device)));
  return copy_lists(places, parts, flag);
}

}  // namespace

AmaxReduction::AmaxReduction(std::shared_ptr<const Comm> ranks)
    : AmaxReduction(
          [on = ranks.get()](std::span<const Tensor> amaxes) { return reduce_over(*on, amaxes); }) {
  ranks_ = std::move(ranks);
}

}  // namespace te_fl::nn
