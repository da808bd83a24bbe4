// The functions of GradientBuckets for ZeRO: this rank's part, and the gathering of values.
#include "nn/autograd/parameter.hpp"
#include "nn/base/tensor_ops.hpp"
#include "nn/optim/gradient_buckets.hpp"

namespace te_fl::nn::detail {

const OwnPart* GradientBuckets::own_part(const Parameter& parameter) const {
  const ParameterState& state = parameter.internals();
  return state.listener == this ? &members_[state.listeners_number].own : nullptr;
}

Status GradientBuckets::gather(const Tensor& flat) const {
  TE_FL_ASSIGN_OR_RETURN(const Tensor own, find_own_part(flat));
  te_fl_all_gather_args args{};
  args.input = own;
  args.output = flat;
  args.comm = ranks_->c();
  return ops::all_gather(args, call_options(flat.device()));
}

// Gathers the master weights. Every rank then quantises the complete weight, since the scale
// depends on all parts.
Status GradientBuckets::gather_codes(const Bucket& bucket,
                                     const std::vector<const Tensor*>& masters) const {
  TE_FL_ASSIGN_OR_RETURN(const Tensor flat,
                         Tensor::zeros({bucket.grads.numel()}, DType::kF32, bucket.grads.device()));
  for (const size_t i : bucket.members) {
    const Member& member = members_[i];
    if (masters[i] == nullptr || member.own.empty()) continue;
    TE_FL_ASSIGN_OR_RETURN(const Tensor own, flat.slice(0, member.begin + member.own.begin,
                                                        member.begin + member.own.end));
    TE_FL_RETURN_IF_ERROR(copy(*masters[i], own));
  }
  TE_FL_RETURN_IF_ERROR(gather(flat));
  for (const size_t i : bucket.members) {
    if (masters[i] == nullptr) continue;
    const Parameter& parameter = *members_[i].parameter.parameter;
    TE_FL_ASSIGN_OR_RETURN(const Tensor whole,
                           shaped(flat, members_[i].begin, parameter.value.shape()));
    TE_FL_RETURN_IF_ERROR(parameter.internals().fp8_values->write(whole, parameter.value));
  }
  return {};
}

Status GradientBuckets::gather_values(const std::vector<NamedParameter>& parameters,
                                      const std::vector<Tensor>& masters) const {
  std::vector<bool> wanted(buckets_.size());
  std::vector<const Tensor*> by_member(members_.size());
  for (size_t i = 0; i < parameters.size(); ++i) {
    const size_t member = parameters[i].parameter->internals().listeners_number;
    wanted[members_[member].bucket] = true;
    by_member[member] = &masters[i];
  }
  for (size_t i = 0; i < buckets_.size(); ++i) {
    if (!wanted[i]) continue;
    TE_FL_RETURN_IF_ERROR(buckets_[i].codes ? gather_codes(buckets_[i], by_member)
                                            : gather(buckets_[i].values));
  }
  return {};
}

}  // namespace te_fl::nn::detail
