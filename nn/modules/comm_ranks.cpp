#include "nn/modules/comm_ranks.hpp"

#include "nn/base/tensor_ops.hpp"
#include "te_fl/nn/fp8/amax_reduction.hpp"

namespace te_fl::nn::detail {

Status all_gather(const Comm& ranks, const Tensor& from, const Tensor& to) {
  te_fl_all_gather_args args{};
  args.input = from;
  args.output = to;
  args.comm = ranks.c();
  return ops::all_gather(args, call_options(from.device()));
}

Status all_reduce(const Comm& ranks, const Tensor& data, int32_t reduction) {
  te_fl_all_reduce_args args{};
  args.reduction = reduction;
  args.input = data;
  args.output = data;
  args.comm = ranks.c();
  return ops::all_reduce(args, call_options(data.device()));
}

Status reduce_scatter(const Comm& ranks, const Tensor& whole, const Tensor& part) {
  te_fl_reduce_scatter_args args{};
  args.input = whole;
  args.output = part;
  args.comm = ranks.c();
  return ops::reduce_scatter(args, call_options(whole.device()));
}

SequenceRanks::Begun CommRanks::all_gather(const Tensor& part, const Tensor& whole, bool) {
  TE_FL_RETURN_IF_ERROR(detail::all_gather(*ranks_, part, whole));
  return std::unique_ptr<Work>();
}

SequenceRanks::Begun CommRanks::reduce_scatter(const Tensor& whole, const Tensor& part, bool) {
  TE_FL_RETURN_IF_ERROR(detail::reduce_scatter(*ranks_, whole, part));
  return std::unique_ptr<Work>();
}

Status CommRanks::sum(const Tensor& values) { return all_reduce(*ranks_, values); }

Status CommRanks::largest(const Tensor& values) {
  return all_reduce(*ranks_, values, TE_FL_REDUCTION_MAX);
}

bool CommRanks::share_amaxes(const AmaxReduction* reduction) const noexcept {
  return reduction != nullptr && reduction->is_over(*ranks_);
}

}  // namespace te_fl::nn::detail
