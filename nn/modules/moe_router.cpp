#include "nn/modules/moe_router.hpp"

#include <array>
#include <utility>

#include "nn/autograd/gradients.hpp"
#include "nn/autograd/parameter.hpp"
#include "nn/autograd/recompute.hpp"
#include "nn/base/tensor_ops.hpp"
#include "nn/modules/row_factors.hpp"

namespace te_fl::nn::detail {
namespace {

// loss = coeff E / (K n^2) sum over e of tokens[e] (sum over t of probs[t, e]).
struct Balance {
  const Tensor& probs;
  const Tensor& tokens;
  int64_t n, experts, top_k;
  float coeff;
};

// Writes the loss, F32 [1], and returns the factor that its backward reads.
Result<Tensor> balance_loss(const Balance& of, const Tensor& loss) {
  TE_FL_ASSIGN_OR_RETURN(Tensor factor, Tensor::empty({1}, DType::kF32, loss.device()));
  te_fl_fused_moe_aux_loss_fwd_args args{};
  args.probs = of.probs;
  args.tokens_per_expert = of.tokens;
  args.aux_loss = loss;
  args.const_buf = factor;
  args.total_num_tokens = of.n;
  args.num_experts = static_cast<int32_t>(of.experts);
  args.topk = static_cast<int32_t>(of.top_k);
  args.coeff = of.coeff;
  TE_FL_RETURN_IF_ERROR(ops::fused_moe_aux_loss_fwd(args, call_options(loss.device())));
  return factor;
}

// grad_probs[t, e] = factor tokens[e] grad.
Status balance_gradient(const Tensor& factor, const Tensor& tokens, const Tensor& grad,
                        const Tensor& grad_probs) {
  te_fl_fused_moe_aux_loss_bwd_args args{};
  args.const_buf = factor;
  args.tokens_per_expert = tokens;
  args.grad_aux_loss = grad;
  args.grad_probs = grad_probs;
  return ops::fused_moe_aux_loss_bwd(args, call_options(grad.device()));
}

// The scores of all experts, F32 [T, E], and the data for their gradient.
Result<Tensor> all_scores(const Tensor& logits, int64_t top_k, ScoreFunction function,
                          Tensor& intermediate) {
  TE_FL_ASSIGN_OR_RETURN(Tensor scores, empty_like(logits, DType::kF32));
  TE_FL_ASSIGN_OR_RETURN(intermediate, empty_like(logits, DType::kF32));
  te_fl_fused_score_for_moe_aux_loss_fwd_args args{};
  args.logits = logits;
  args.scores = scores;
  args.intermediate_output = intermediate;
  args.topk = static_cast<int32_t>(top_k);
  args.score_function = static_cast<int32_t>(function);
  TE_FL_RETURN_IF_ERROR(ops::fused_score_for_moe_aux_loss_fwd(args, call_options(logits.device())));
  return scores;
}

// The log-sum-exp of each row, F32 [T]. The cross-entropy op computes it, whatever the targets are.
Result<Tensor> log_sum_exp(const Tensor& logits) {
  const Device device = logits.device();
  const std::array<int64_t, 1> rows = {logits.size(0)};
  TE_FL_ASSIGN_OR_RETURN(const Tensor targets, Tensor::zeros(rows, DType::kI32, device));
  TE_FL_ASSIGN_OR_RETURN(const Tensor loss, Tensor::empty(rows, DType::kF32, device));
  TE_FL_ASSIGN_OR_RETURN(Tensor lse, Tensor::empty(rows, DType::kF32, device));
  te_fl_cross_entropy_fwd_args args{};
  args.logits = logits;
  args.targets = targets;
  args.loss = loss;
  args.lse = lse;
  TE_FL_RETURN_IF_ERROR(ops::cross_entropy_fwd(args, call_options(device)));
  return lse;
}

}  // namespace

Result<Tensor> Fp32Linear::forward(const Tensor& x) const {
  TE_FL_RETURN_IF_ERROR(same_parameter(weight_.get()));
  Tensor a = x, b = weight_->value;
  if (a.dtype() != b.dtype()) {
    TE_FL_ASSIGN_OR_RETURN(a, cast(a, DType::kF32));
    TE_FL_ASSIGN_OR_RETURN(b, cast(b, DType::kF32));
  }
  TE_FL_ASSIGN_OR_RETURN(Tensor logits,
                         Tensor::empty({x.size(0), b.size(0)}, DType::kF32, x.device()));
  te_fl_generic_gemm_args args{};
  args.a = a;
  args.b = b;
  args.trans_b = 1;
  args.d = logits;
  TE_FL_RETURN_IF_ERROR(ops::generic_gemm(args, call_options(x.device())));
  return logits;
}

Result<Tensor> Fp32Linear::backward(const Tensor& dlogits, const Tensor& x,
                                    const Tensor& residual) const {
  const CallOptions options = call_options(x.device());
  TE_FL_ASSIGN_OR_RETURN(const Tensor weight, cast(weight_->value, DType::kF32));
  TE_FL_ASSIGN_OR_RETURN(Tensor dx, empty_like(x, x.dtype()));
  te_fl_generic_gemm_args dgrad{};
  dgrad.a = dlogits;
  dgrad.b = weight;
  dgrad.d = dx;
  if (residual.defined()) dgrad.residual = residual;
  TE_FL_RETURN_IF_ERROR(ops::generic_gemm(dgrad, options));
  if (!weight_->requires_grad) return dx;
  TE_FL_ASSIGN_OR_RETURN(const Tensor rows, cast(x, DType::kF32));
  te_fl_generic_gemm_args wgrad{};
  wgrad.a = dlogits;
  wgrad.trans_a = 1;
  wgrad.b = rows;
  TE_FL_ASSIGN_OR_RETURN(wgrad.accumulate, adds(*weight_));
  wgrad.d = weight_->grad;
  TE_FL_RETURN_IF_ERROR(ops::generic_gemm(wgrad, options));
  wrote(*weight_);
  return dx;
}

void MoERouter::Saved::visit_tensors(const Ctx::Visitor& visitor) {
  for (Tensor* t : {&topk_indices, &intermediate, &scores_intermediate, &balance_factor, &tokens,
                    &softmax, &lse}) {
    visitor(*t);
  }
}

MoERouter::MoERouter(const MoELayerOptions& options, std::shared_ptr<Parameter> weight,
                     std::shared_ptr<Parameter> expert_bias)
    : options_(options), linear_(std::move(weight)), expert_bias_(std::move(expert_bias)) {}

bool MoERouter::has_losses() const noexcept {
  return options_.aux_loss_coeff != 0 || options_.z_loss_coeff != 0;
}

Result<Routing> MoERouter::choose(const Tensor& x, Saved& saved, Tensor& logits) const {
  const Device device = x.device();
  saved.version = weight()->version;
  TE_FL_ASSIGN_OR_RETURN(logits, linear_.forward(x));
  Routing routing;
  TE_FL_ASSIGN_OR_RETURN(routing.probs, empty_like(logits, DType::kF32));
  TE_FL_ASSIGN_OR_RETURN(routing.routing_map, empty_like(logits, DType::kBool));
  TE_FL_ASSIGN_OR_RETURN(routing.topk_indices,
                         Tensor::empty({x.size(0), options_.top_k}, DType::kI32, device));
  TE_FL_ASSIGN_OR_RETURN(saved.intermediate, empty_like(logits, DType::kF32));
  saved.topk_indices = routing.topk_indices;
  te_fl_fused_topk_with_score_function_fwd_args args{};
  args.logits = logits;
  if (expert_bias_ != nullptr) {
    TE_FL_RETURN_IF_ERROR(same_parameter(expert_bias_.get()));
    args.expert_bias = expert_bias_->value;
  }
  args.probs = routing.probs;
  args.routing_map = routing.routing_map;
  args.topk_indices = routing.topk_indices;
  args.intermediate_output = saved.intermediate;
  args.topk = static_cast<int32_t>(options_.top_k);
  args.use_pre_softmax = options_.use_pre_softmax;
  args.num_groups = static_cast<int32_t>(options_.num_groups);
  args.group_topk = static_cast<int32_t>(options_.group_topk);
  args.scaling_factor = options_.scaling_factor;
  args.score_function = static_cast<int32_t>(options_.score_function);
  TE_FL_RETURN_IF_ERROR(ops::fused_topk_with_score_function_fwd(args, call_options(device)));
  return routing;
}

Status MoERouter::losses(const Tensor& logits, const Tensor& tokens, Saved& saved,
                         const Tensor& loss) const {
  const int64_t n = logits.size(0);
  if (n == 0) return fill(loss, 0);
  if (options_.aux_loss_coeff != 0) {
    TE_FL_ASSIGN_OR_RETURN(
        const Tensor scores,
        all_scores(logits, options_.top_k, options_.score_function, saved.scores_intermediate));
    saved.tokens = tokens;
    TE_FL_ASSIGN_OR_RETURN(saved.balance_factor,
                           balance_loss({scores, tokens, n, options_.num_experts, options_.top_k,
                                         options_.aux_loss_coeff},
                                        loss));
  }
  if (options_.z_loss_coeff == 0) return {};
  // coeff / n times the sum of the squared log-sum-exps is a load-balancing loss of one "token"
  // whose "experts" are the rows, with the log-sum-exps as both probabilities and counts.
  TE_FL_ASSIGN_OR_RETURN(saved.lse, log_sum_exp(logits));
  TE_FL_ASSIGN_OR_RETURN(
      saved.softmax, all_scores(logits, options_.top_k, ScoreFunction::kSoftmax, saved.softmax));
  TE_FL_ASSIGN_OR_RETURN(const Tensor row, saved.lse.view({1, n}));
  TE_FL_ASSIGN_OR_RETURN(const Tensor z, empty_like(loss, DType::kF32));
  const float coeff = options_.z_loss_coeff / static_cast<float>(n);
  TE_FL_RETURN_IF_ERROR(balance_loss({row, saved.lse, 1, 1, 1, coeff}, z).status());
  return options_.aux_loss_coeff != 0 ? add(loss, z, loss) : copy(z, loss);
}

Status MoERouter::add_loss_gradients(const Saved& saved, const Tensor& loss_grad,
                                     const Tensor& dlogits) const {
  const Device device = dlogits.device();
  const int64_t n = dlogits.size(0);
  Tensor grad = loss_grad;
  if (!grad.defined()) {
    TE_FL_ASSIGN_OR_RETURN(grad, Tensor::empty({1}, DType::kF32, device));
    TE_FL_RETURN_IF_ERROR(fill(grad, 1));
  }
  TE_FL_ASSIGN_OR_RETURN(const Tensor part, empty_like(dlogits, DType::kF32));
  if (saved.balance_factor.defined()) {
    TE_FL_ASSIGN_OR_RETURN(const Tensor d_scores, empty_like(dlogits, DType::kF32));
    TE_FL_RETURN_IF_ERROR(balance_gradient(saved.balance_factor, saved.tokens, grad, d_scores));
    te_fl_fused_score_for_moe_aux_loss_bwd_args args{};
    args.intermediate_output = saved.scores_intermediate;
    args.grad_scores = d_scores;
    args.grad_logits = part;
    args.topk = static_cast<int32_t>(options_.top_k);
    args.score_function = static_cast<int32_t>(options_.score_function);
    TE_FL_RETURN_IF_ERROR(ops::fused_score_for_moe_aux_loss_bwd(args, call_options(device)));
    TE_FL_RETURN_IF_ERROR(add(dlogits, part, dlogits));
  }
  if (!saved.lse.defined()) return {};
  // dlogits[t] += 2 coeff / n lse[t] grad softmax[t]
  TE_FL_ASSIGN_OR_RETURN(const Tensor factor, Tensor::empty({1}, DType::kF32, device));
  TE_FL_RETURN_IF_ERROR(fill(factor, 2.0 * options_.z_loss_coeff / static_cast<double>(n)));
  TE_FL_ASSIGN_OR_RETURN(const Tensor factors, Tensor::empty({1, n}, DType::kF32, device));
  TE_FL_RETURN_IF_ERROR(balance_gradient(factor, saved.lse, grad, factors));
  TE_FL_ASSIGN_OR_RETURN(const Tensor column, factors.view({n, 1}));
  TE_FL_ASSIGN_OR_RETURN(const Tensor identity, identity_rows(n, device));
  TE_FL_RETURN_IF_ERROR(scale_rows(saved.softmax, identity, column, part));
  return add(dlogits, part, dlogits);
}

Result<Tensor> MoERouter::backward(const Tensor& d_probs, const Saved& saved, const Tensor& x,
                                   const Tensor& loss_grad, const Tensor& residual) const {
  TE_FL_ASSIGN_OR_RETURN(const Tensor dlogits, empty_like(d_probs, DType::kF32));
  te_fl_fused_topk_with_score_function_bwd_args args{};
  args.topk_indices = saved.topk_indices;
  args.intermediate_output = saved.intermediate;
  args.grad_probs = d_probs;
  args.grad_logits = dlogits;
  args.topk = static_cast<int32_t>(options_.top_k);
  args.use_pre_softmax = options_.use_pre_softmax;
  args.scaling_factor = options_.scaling_factor;
  args.score_function = static_cast<int32_t>(options_.score_function);
  TE_FL_RETURN_IF_ERROR(ops::fused_topk_with_score_function_bwd(args, call_options(x.device())));
  if (saved.balance_factor.defined() || saved.lse.defined()) {
    TE_FL_RETURN_IF_ERROR(add_loss_gradients(saved, loss_grad, dlogits));
  }
  return linear_.backward(dlogits, x, residual);
}

}  // namespace te_fl::nn::detail
