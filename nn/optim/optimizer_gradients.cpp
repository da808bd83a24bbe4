#include "nn/optim/optimizer_gradients.hpp"

#include <cmath>
#include <string>
#include <utility>

#include "nn/autograd/parameter.hpp"
#include "nn/base/tensor_ops.hpp"
#include "te_fl/nn/base/item.hpp"

namespace te_fl::nn::detail {
namespace {

// Gradients that are sharded over the ranks of Gradients::ranks, and gradients that every rank has
// completely.
struct Split {
  Pointers divided, whole;
};

Split split(const Gradients& gradients) {
  Split result;
  for (size_t i = 0; i < gradients.parameters.size(); ++i) {
    const NamedParameter& p = gradients.parameters[i];
    if (!trained(*p.parameter)) continue;
    const Tensor& grad = gradients.parts.empty() ? p.grad() : gradients.parts[i]->grad;
    if (!grad.defined()) continue;
    (p.parameter->shard.whole.empty() ? result.whole : result.divided).push_back(grad);
  }
  return result;
}

bool several(const Comm* ranks) { return ranks != nullptr && ranks->size() > 1; }

Status own_norm_into(const Pointers& tensors, const Tensor& norm) {
  if (tensors.empty()) return fill(norm, 0);
  te_fl_multi_tensor_l2norm_args args{};
  args.inputs = tensors.data();
  args.inputs_count = static_cast<int64_t>(tensors.size());
  args.norm = norm;
  return ops::multi_tensor_l2norm(args, call_options(norm.device()));
}

Status gather(const Tensor& own, const Tensor& all, const Comm& ranks) {
  te_fl_all_gather_args args{};
  args.input = own;
  args.output = all;
  args.comm = ranks.c();
  return ops::all_gather(args, call_options(own.device()));
}

// With ZeRO: combines the norms of the ranks' parts; the result is the norm of the vector of norms.
Status join_parts(const Tensor& norm, const GradientBuckets* zero) {
  if (zero == nullptr) return {};
  const Comm& ranks = zero->ranks();
  TE_FL_ASSIGN_OR_RETURN(const Tensor all,
                         Tensor::empty({ranks.size()}, DType::kF32, norm.device()));
  TE_FL_RETURN_IF_ERROR(gather(norm, all, ranks));
  return own_norm_into({all}, norm);
}

Status check_division(const std::string& who, const NamedParameter& p, const Gradients& gradients) {
  const ParameterState& state = p.parameter->internals();
  if (gradients.zero != nullptr ? state.listener == gradients.zero : !state.grad_divided) return {};
  return failed_precondition(
      who + ": the gradient of " + p.name +
      (gradients.zero != nullptr
           ? " is not divided over ranks any more: the DataParallel that the optimizer was created "
             "with is not the parameters' last one; create another optimizer"
           : " is divided over ranks (DataParallelOptions::zero), and this one has the mean of a "
             "part alone; give the optimizer the DataParallel by AdamOptions::zero, and clip by "
             "AdamOptions::max_grad_norm"));
}

void set_in_place(te_fl_multi_tensor_scale_args& args, const Pointers& grads) {
  using Args = te_fl_multi_tensor_scale_args;
  set_list(args, &Args::inputs, &Args::inputs_count, grads);
  set_list(args, &Args::outputs, &Args::outputs_count, grads);
}

Status largest(const Tensor& flag, const Comm& ranks) {
  te_fl_all_reduce_args args{};
  args.input = flag;
  args.output = flag;
  args.comm = ranks.c();
  args.reduction = TE_FL_REDUCTION_MAX;
  return ops::all_reduce(args, call_options(flag.device()));
}

}  // namespace

Pointers list_pointers(const Gradients& gradients) {
  Split split = detail::split(gradients);
  split.whole.insert(split.whole.end(), split.divided.begin(), split.divided.end());
  return std::move(split.whole);
}

Status check_fresh(const char* who, const Gradients& gradients) {
  for (const NamedParameter& p : gradients.parameters) {
    TE_FL_RETURN_IF_ERROR(check_writable(who, p.name, *p.parameter));
    if (!p.parameter->requires_grad) continue;
    TE_FL_RETURN_IF_ERROR(check_complete(who, p));
    TE_FL_RETURN_IF_ERROR(check_division(who, p, gradients));
    if (!p.parameter->internals().grad_stale) continue;
    return failed_precondition(
        std::string(who) + ": the gradient of " + p.name +
        " was cleared by clear_grad() and not written since, so it holds an earlier step's values; "
        "run a backward first, use zero_grad() where it is to count as zero, or give what you "
        "wrote yourself by Parameter::give_grad(gradient, true)");
  }
  if (gradients.zero == nullptr || gradients.zero->averaged()) return {};
  return failed_precondition(std::string(who) +
                             ": the gradients have been written or cleared since "
                             "DataParallel::average_gradients(), and ZeRO updates a part by the "
                             "mean of all ranks; call it after the last backward");
}

Status end_backwards(const std::vector<NamedParameter>& parameters) {
  for (const NamedParameter& p : parameters) {
    const auto updates = std::exchange(p.parameter->internals().gradient_updates, nullptr);
    if (updates != nullptr) TE_FL_RETURN_IF_ERROR(updates->end());
  }
  return {};
}

Status norm_into(const Gradients& gradients, const Tensor& norm) {
  if (!several(gradients.ranks)) {
    TE_FL_RETURN_IF_ERROR(own_norm_into(list_pointers(gradients), norm));
    return join_parts(norm, gradients.zero);
  }
  const Split split = detail::split(gradients);
  const int64_t n = gradients.ranks->size();
  TE_FL_ASSIGN_OR_RETURN(const Tensor norms, Tensor::empty({n + 1}, DType::kF32, norm.device()));
  TE_FL_ASSIGN_OR_RETURN(const Tensor gathered, norms.slice(0, 0, n));
  TE_FL_ASSIGN_OR_RETURN(const Tensor common, norms.slice(0, n, n + 1));
  TE_FL_ASSIGN_OR_RETURN(const Tensor own, Tensor::empty({1}, DType::kF32, norm.device()));
  TE_FL_RETURN_IF_ERROR(own_norm_into(split.divided, own));
  TE_FL_RETURN_IF_ERROR(join_parts(own, gradients.zero));
  TE_FL_RETURN_IF_ERROR(own_norm_into(split.whole, common));
  TE_FL_RETURN_IF_ERROR(join_parts(common, gradients.zero));
  TE_FL_RETURN_IF_ERROR(gather(own, gathered, *gradients.ranks));
  return own_norm_into({norms}, norm);
}

Result<float> clip(const char* who, const Gradients& gradients, float max_norm) {
  TE_FL_RETURN_IF_ERROR(check_fresh(who, gradients));
  const Pointers grads = list_pointers(gradients);
  const bool alone = !several(gradients.ranks) && gradients.zero == nullptr;
  if (gradients.parameters.empty() || (grads.empty() && alone)) return 0.0f;
  const Device device = gradients.parameters.front().value().device();
  TE_FL_ASSIGN_OR_RETURN(Tensor norm, Tensor::empty({1}, DType::kF32, device));
  TE_FL_RETURN_IF_ERROR(norm_into(gradients, norm));
  TE_FL_ASSIGN_OR_RETURN(float value, item(norm));
  if (!std::isfinite(value) || value <= max_norm || grads.empty()) return value;
  TE_FL_ASSIGN_OR_RETURN(Tensor flag, Tensor::empty({1}, DType::kI32, device));
  TE_FL_RETURN_IF_ERROR(fill(flag, 0));
  te_fl_multi_tensor_scale_args args{};
  set_in_place(args, grads);
  args.noop_flag = flag;
  args.scale = max_norm / value;
  TE_FL_RETURN_IF_ERROR(ops::multi_tensor_scale(args, call_options(device)));
  return value;
}

Status scale_by_norm(const Gradients& gradients, const Tensor& norm, float max_norm,
                     const Tensor& noop, const Device& device) {
  const Pointers grads = list_pointers(gradients);
  if (grads.empty()) return {};
  te_fl_multi_tensor_scale_args args{};
  set_in_place(args, grads);
  args.noop_flag = noop;
  args.norm = norm;
  args.max_norm = max_norm;
  return ops::multi_tensor_scale(args, call_options(device));
}

Status agree_on(const Gradients& gradients, const Tensor& flag) {
  if (gradients.zero != nullptr) TE_FL_RETURN_IF_ERROR(largest(flag, gradients.zero->ranks()));
  return several(gradients.ranks) ? largest(flag, *gradients.ranks) : Status();
}

}  // namespace te_fl::nn::detail
