#pragma once

#include <memory>

#include "te_fl/nn/modules/module.hpp"
#include "te_fl/nn/modules/moe_options.hpp"

namespace te_fl::nn {

// The results of a forward beside its output. Defined tensors are written in place; undefined ones
// are allocated if the module has them.
struct MoEAuxiliary {
  Tensor aux_loss;           // F32 [1], the sum of the auxiliary losses; only with a coefficient
  Tensor tokens_per_expert;  // I64 [num_experts], number of tokens of each expert
  // F32 [1], given by the caller, which writes it before the backward: the gradient of aux_loss.
  // Undefined: 1, for a loss to which aux_loss is added.
  Tensor aux_loss_grad;
};

// A mixture of experts: a router chooses top_k of the experts, which are MLPs, for each token, and
// the token's output is the sum of their outputs, weighted by the router's probabilities. No token
// is dropped. The router computes in FP32. Under FP8 each expert has its own scales, and its rows
// are padded with zeros to a multiple of 16, with MXFP8BlockScaling of 32.
//
// If the activation has an op with one factor per row (swiglu, clamped_swiglu, srelu) and fc2 has
// no bias, the activation applies the probabilities; otherwise the sum over experts does, and the
// forward also keeps fc2's output.
//
// A forward keeps for its backward: x, the output of fc1, the probabilities and the map from tokens
// to rows; in FP8 also the column-wise codes of the inputs of fc1 and fc2. Without FP8 the backward
// gathers the rows of x and computes the activation again.
//
// Parameters: router_weight [num_experts, hidden], expert_bias F32 [num_experts], fc1_weight
// [num_experts, ffn or 2 ffn if gated, hidden], fc1_bias, fc2_weight [num_experts, hidden, ffn],
// fc2_bias (without single_grouped_weight: fc1_weight0, ..), shared_gate_weight [1, hidden], and
// the parameters of the submodule shared_experts. FP8 states: fc1_gemm0, .., fc2_gemm0, ...
class TE_FL_API MoELayer : public Module {
 public:
  static Result<std::unique_ptr<MoELayer>> create(const MoELayerOptions& options);
  ~MoELayer() override;
  // x [..., hidden] -> [..., hidden]. `auxiliary` may be null. ctx and options are as in Linear.
  Result<Tensor> forward(const Tensor& x, Ctx* ctx, const ForwardOptions& options = {},
                         MoEAuxiliary* auxiliary = nullptr);
  // dy [..., hidden] -> dx in x's dtype. Adds to the parameters' gradients, including those of
  // aux_loss.
  Result<Tensor> backward(const Tensor& dy, Ctx& ctx);
  // Adds `rate` to the expert_bias of the experts with fewer tokens than the mean, and subtracts it
  // from that of experts with more (arXiv 2408.15664). tokens_per_expert: I64 [num_experts], the
  // sum over the microbatches and data-parallel ranks of a step. Waits for the device.
  // FAILED_PRECONDITION without expert_bias.
  Status update_expert_bias(const Tensor& tokens_per_expert, float rate = 1e-3f);

 private:
  struct Impl;
  MoELayer();
  std::unique_ptr<Impl> impl_;
};

}  // namespace te_fl::nn
