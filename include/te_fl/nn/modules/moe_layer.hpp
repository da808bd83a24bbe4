#pragma once

#include <cstdint>
#include <memory>
#include <string_view>

#include "te_fl/nn/modules/activation.hpp"
#include "te_fl/nn/modules/module.hpp"

namespace te_fl::nn {

// The function from a router's logits to scores; see docs/numerics.md, Experts.
enum class ScoreFunction : uint8_t { kSigmoid, kSoftmax, kSqrtSoftplus };
TE_FL_API std::string_view name(ScoreFunction function) noexcept;  // "sigmoid"
TE_FL_API Result<ScoreFunction> parse_score_function(std::string_view text);

struct MoELayerOptions {
  int64_t hidden_size = 0;
  int64_t ffn_hidden_size = 0;  // of each expert
  int64_t num_experts = 0;
  int64_t top_k = 2;  // number of experts of each token
  Activation activation = Activation::kSwiglu;
  float clamp_limit = 7.0f;        // only for kClampedSwiglu
  float clamp_alpha = 1.702f;      // only for kClampedSwiglu
  float glu_linear_offset = 1.0f;  // only for kClampedSwiglu: added to the clamped linear half
  bool bias = false;               // biases of the experts and of the shared experts
  ScoreFunction score_function = ScoreFunction::kSoftmax;
  bool use_pre_softmax = false;  // softmax over all experts before the choice; only for kSoftmax
  int64_t num_groups = 0;        // of experts; 0: the choice is not limited to groups
  int64_t group_topk = 0;        // number of groups that are chosen first
  float scaling_factor = 1;      // of the probabilities
  // The module has the parameter expert_bias, which is added to the scores for the choice. It has
  // no gradient; update_expert_bias() changes it. Not with kSoftmax.
  bool expert_bias = false;
  float aux_loss_coeff = 0;  // of the load-balancing loss; 0: none
  float z_loss_coeff = 0;    // of the mean of the squared log-sum-exp of the logits; 0: none
  // Width of an MLP that every token passes; its output is added to that of the experts. 0: none.
  int64_t shared_ffn_hidden_size = 0;
  bool shared_expert_gate = false;  // multiplies its output by sigmoid(x w) for each token
  // All experts' weights are one parameter [num_experts, out, in] per linear map, and so are the
  // biases. False: each expert has parameters of its own, which can be frozen one by one.
  bool single_grouped_weight = true;
  DType param_dtype = DType::kF32;
  DType activation_dtype = DType::kF32;  // dtype of the output
  Device device = {};
  uint64_t seed = 0;
  float init_std = 0.023f;
  float output_init_std = 0.023f;  // standard deviation of fc2
};

// What a forward computes beside its output. Defined tensors are written in place; undefined ones
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
// are padded with zeros to a multiple of 16.
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
// those of the submodule shared_experts. FP8 states: fc1_gemm0, .., fc2_gemm0, ...
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
