#include "te_fl/nn/modules/loss.hpp"

#include <algorithm>
#include <string>

#include "nn/autograd/ctx.hpp"
#include "nn/base/tensor_ops.hpp"

namespace te_fl::nn {

struct CrossEntropyLoss::Saved : Ctx::Record {
  Tensor logits;
  Tensor targets;
  Tensor lse;
  double divisor = 1;
};

namespace {

// alpha * sum of a tensor's elements, as a product with ones. F32 [1].
Result<Tensor> scaled_sum(const Tensor& values, double alpha) {
  const int64_t n = values.numel();
  TE_FL_ASSIGN_OR_RETURN(Tensor ones, Tensor::empty({1, n}, DType::kF32, values.device()));
  TE_FL_RETURN_IF_ERROR(detail::fill(ones, 1));
  TE_FL_ASSIGN_OR_RETURN(Tensor column, values.view({n, 1}));
  TE_FL_ASSIGN_OR_RETURN(Tensor sum, Tensor::empty({1, 1}, DType::kF32, values.device()));
  te_fl_generic_gemm_args args{};
  args.a = ones;
  args.b = column;
  args.d = sum;
  args.alpha = static_cast<float>(alpha);
  TE_FL_RETURN_IF_ERROR(ops::generic_gemm(args, detail::call_options(sum.device())));
  return sum.view({1});
}

}  // namespace

Result<Tensor> CrossEntropyLoss::forward(const Tensor& logits, const Tensor& targets, Ctx* ctx,
                                         double divisor) {
  if (!logits.defined() || !targets.defined()) {
    return invalid_argument("CrossEntropyLoss: logits or targets is undefined");
  }
  if (!(divisor >= 0)) {
    return invalid_argument("CrossEntropyLoss: divisor is " + std::to_string(divisor) +
                            "; it must be greater than 0, or 0 for the number of rows");
  }
  TE_FL_ASSIGN_OR_RETURN(auto record, detail::new_record<Saved>(ctx, "CrossEntropyLoss"));
  record->logits = logits;
  record->targets = targets;
  record->divisor =
      divisor > 0 ? divisor : static_cast<double>(std::max<int64_t>(targets.numel(), 1));
  TE_FL_ASSIGN_OR_RETURN(Tensor losses, detail::empty_like(targets, DType::kF32));
  TE_FL_ASSIGN_OR_RETURN(record->lse, detail::empty_like(targets, DType::kF32));
  te_fl_cross_entropy_fwd_args args{};
  args.logits = logits;
  args.targets = targets;
  args.loss = losses;
  args.lse = record->lse;
  args.label_smoothing = options_.label_smoothing;
  args.ignore_index = options_.ignore_index;
  TE_FL_RETURN_IF_ERROR(ops::cross_entropy_fwd(args, detail::call_options(logits.device())));
  TE_FL_ASSIGN_OR_RETURN(Tensor loss, scaled_sum(losses, 1 / record->divisor));
  if (ctx != nullptr) TE_FL_RETURN_IF_ERROR(ctx->store(this, std::move(record)));
  return loss;
}

Result<Tensor> CrossEntropyLoss::run_backward(const Saved& saved, const Tensor& grad_loss) {
  TE_FL_ASSIGN_OR_RETURN(Tensor grad, detail::empty_like(saved.logits, saved.logits.dtype()));
  te_fl_cross_entropy_bwd_args args{};
  args.grad_loss = grad_loss;
  args.logits = saved.logits;
  args.targets = saved.targets;
  args.lse = saved.lse;
  args.grad_logits = grad;
  args.label_smoothing = options_.label_smoothing;
  args.ignore_index = options_.ignore_index;
  TE_FL_RETURN_IF_ERROR(ops::cross_entropy_bwd(args, detail::call_options(grad.device())));
  return grad;
}

Result<Tensor> CrossEntropyLoss::backward(Ctx& ctx, double grad_scale) {
  TE_FL_ASSIGN_OR_RETURN(auto taken, ctx.take(this, "CrossEntropyLoss"));
  const auto& saved = static_cast<Saved&>(*taken);
  TE_FL_ASSIGN_OR_RETURN(Tensor grad_loss, detail::empty_like(saved.lse, DType::kF32));
  TE_FL_RETURN_IF_ERROR(detail::fill(grad_loss, grad_scale / saved.divisor));
  return run_backward(saved, grad_loss);
}

Result<Tensor> CrossEntropyLoss::backward(Ctx& ctx, const Tensor& dloss) {
  TE_FL_ASSIGN_OR_RETURN(auto taken, ctx.take(this, "CrossEntropyLoss"));
  const auto& saved = static_cast<Saved&>(*taken);
  if (!dloss.defined() || dloss.dtype() != DType::kF32 || dloss.numel() != 1) {
    return invalid_argument("CrossEntropyLoss: dloss is " +
                            (dloss.defined() ? dloss.describe() : std::string("undefined")) +
                            "; it must be F32 with one element");
  }
  // The scalar on every row, as a product with ones.
  const int64_t n = saved.lse.numel();
  TE_FL_ASSIGN_OR_RETURN(const Tensor ones, Tensor::empty({n, 1}, DType::kF32, dloss.device()));
  TE_FL_RETURN_IF_ERROR(detail::fill(ones, 1));
  TE_FL_ASSIGN_OR_RETURN(const Tensor scalar, dloss.view({1, 1}));
  TE_FL_ASSIGN_OR_RETURN(const Tensor rows, Tensor::empty({n, 1}, DType::kF32, dloss.device()));
  te_fl_generic_gemm_args args{};
  args.a = ones;
  args.b = scalar;
  args.d = rows;
  args.alpha = static_cast<float>(1 / saved.divisor);
  TE_FL_RETURN_IF_ERROR(ops::generic_gemm(args, detail::call_options(dloss.device())));
  TE_FL_ASSIGN_OR_RETURN(const Tensor grad_loss, rows.view(saved.lse.shape()));
  return run_backward(saved, grad_loss);
}

}  // namespace te_fl::nn
