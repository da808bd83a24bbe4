#pragma once

#include <cstdint>
#include <memory>
#include <string_view>

#include "te_fl/comm.hpp"
#include "te_fl/nn/modules/activation.hpp"

namespace te_fl::nn {

// The function from a router's logits to scores; see docs/numerics.md, Experts.
enum class ScoreFunction : uint8_t { kSigmoid, kSoftmax, kSqrtSoftplus };
TE_FL_API std::string_view name(ScoreFunction function) noexcept;  // "sigmoid"
TE_FL_API Result<ScoreFunction> parse_score_function(std::string_view text);

class ExpertRanks;

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
  // The ranks over which the experts are divided (expert parallelism): rank r of n has the weights
  // of num_experts / n experts, from r num_experts / n on, and tokens of its own. Null: this rank
  // has all experts.
  std::shared_ptr<const Comm> expert_ranks = {};
  // A framework's process group, used instead of expert_ranks.
  std::shared_ptr<ExpertRanks> framework_expert_ranks = {};
};

}  // namespace te_fl::nn
