#pragma once

#include <memory>

#include "te_fl/nn/autograd/ctx.hpp"
#include "te_fl/nn/autograd/parameter.hpp"
#include "te_fl/nn/modules/moe_options.hpp"

namespace te_fl::nn::detail {

// One row of logits per token in FP32: x [T, in] -> [T, out]. If x and the weight have one dtype,
// the GEMM reads them as they are and rounds its FP32 sums to FP32; otherwise both are cast to FP32
// first.
class Fp32Linear {
 public:
  explicit Fp32Linear(std::shared_ptr<Parameter> weight) : weight_(std::move(weight)) {}
  const std::shared_ptr<Parameter>& weight() const noexcept { return weight_; }
  Result<Tensor> forward(const Tensor& x) const;
  // dlogits F32 [T, out] -> the gradient of x in x's dtype, plus `residual` [T, in] if that is
  // defined. Adds to the weight's gradient.
  Result<Tensor> backward(const Tensor& dlogits, const Tensor& x, const Tensor& residual) const;

 private:
  std::shared_ptr<Parameter> weight_;
};

// The experts that a router has chosen for each token.
struct Routing {
  Tensor probs;         // F32 [T, E]; 0 for experts that are not chosen
  Tensor routing_map;   // BOOL [T, E]
  Tensor topk_indices;  // I32 [T, K]
};

// The router of a mixture: logits, choice of experts, probabilities and auxiliary losses.
class MoERouter {
 public:
  // Tensors that the backward reads.
  struct Saved {
    Tensor topk_indices, intermediate;
    Tensor scores_intermediate, balance_factor, tokens;  // of the load-balancing loss
    Tensor softmax, lse;                                 // of the z-loss
    uint64_t version = 0;                                // of the weight in the forward
    void visit_tensors(const Ctx::Visitor& visitor);
  };

  // `expert_bias` may be null.
  MoERouter(const MoELayerOptions& options, std::shared_ptr<Parameter> weight,
            std::shared_ptr<Parameter> expert_bias);
  const std::shared_ptr<Parameter>& weight() const noexcept { return linear_.weight(); }
  const std::shared_ptr<Parameter>& expert_bias() const noexcept { return expert_bias_; }

  // x [T, hidden] -> the chosen experts. `logits` receives the logits for losses().
  Result<Routing> choose(const Tensor& x, Saved& saved, Tensor& logits) const;
  // The sum of the auxiliary losses, F32 [1], written to `loss`. tokens: F32 [E], number of tokens
  // of each expert.
  Status losses(const Tensor& logits, const Tensor& tokens, Saved& saved, const Tensor& loss) const;
  bool has_losses() const noexcept;
  // Adds to the weight's gradient. d_probs: F32 [T, E]. loss_grad: F32 [1], the gradient of the
  // auxiliary loss; undefined: 1. Returns the gradient of x plus `residual`, as Fp32Linear does.
  Result<Tensor> backward(const Tensor& d_probs, const Saved& saved, const Tensor& x,
                          const Tensor& loss_grad, const Tensor& residual) const;

 private:
  Status add_loss_gradients(const Saved& saved, const Tensor& loss_grad,
                            const Tensor& dlogits) const;

  MoELayerOptions options_;
  Fp32Linear linear_;
  std::shared_ptr<Parameter> expert_bias_;
};

}  // namespace te_fl::nn::detail
