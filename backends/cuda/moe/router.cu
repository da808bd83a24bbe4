// The router ops: choice of experts and auxiliary loss.
#include "moe/kernel_names.hpp"
#include "moe/router.cuh"
#include "moe/router_choice.hpp"

#include <algorithm>

#include "common/overlap.hpp"
#include "common/value_checks.hpp"
#include "moe/aux_loss.cuh"
#include "plugin/families.hpp"
#include "te_fl/ops/moe.h"

namespace te_fl::cuda {
namespace {

constexpr const char* kTooMany = "takes up to 1024 experts, in up to 512 groups";

// Calls f(lanes per token, experts per lane) with the choice as compile-time constants.
template <class F>
void with_lanes(const RouterChoice& choice, F&& f) {
  const auto call = [&]<int kLanes, int kPer>() {
    f(std::integral_constant<int, kLanes>{}, std::integral_constant<int, kPer>{});
  };
  if (choice.experts == 16) return call.template operator()<32, 16>();
  if (choice.experts == 32) return call.template operator()<32, 32>();
  switch (choice.lanes) {
    case 1:
      return call.template operator()<1, 8>();
    case 2:
      return call.template operator()<2, 8>();
    case 4:
      return call.template operator()<4, 8>();
    case 8:
      return call.template operator()<8, 8>();
    case 16:
      return call.template operator()<16, 8>();
    default:
      return call.template operator()<32, 8>();
  }
}

template <class T>
T* data_or_null(const te_fl_tensor* t) {
  return t != nullptr ? backend::data<T>(*t) : nullptr;
}
int index_bytes_of(const te_fl_tensor* t) { return t != nullptr ? t->dl.dtype.bits / 8 : 4; }

unsigned lane_blocks(const RouterChoice& choice, int64_t tokens) {
  static_assert(kRouterThreads == kThreads);
  return static_cast<unsigned>(router_blocks(choice, tokens, current_multiprocessors()));
}

void topk_fwd(const te_fl_context& ctx, const te_fl_fused_topk_with_score_function_fwd_args& a) {
  const backend::Matrix m = backend::as_matrix(*a.logits);
  if (m.rows == 0) return;
  const RouterShape shape{
      m.rows,           static_cast<int>(m.cols), a.topk,          a.num_groups, a.group_topk,
      a.score_function, a.use_pre_softmax != 0,   a.scaling_factor};
  const ChoiceOutputs choice{data_or_null<uint8_t>(a.routing_map),
                             data_or_null<uint8_t>(a.routing_bits),
                             data_or_null<void>(a.topk_indices), index_bytes_of(a.topk_indices)};
  const RouterChoice lanes = choose_router(m.cols);
  with_lanes(lanes, [&]<int kLanes, int kPer>(std::integral_constant<int, kLanes>,
                                              std::integral_constant<int, kPer>) {
    const size_t shared =
        static_cast<size_t>(a.num_groups) * (kThreads / kLanes) * sizeof(uint32_t);
    topk_kernel<kLanes, kPer><<<lane_blocks(lanes, m.rows), kThreads, shared, stream_of(ctx)>>>(
        RowSource(*a.logits), data_or_null<const float>(a.expert_bias), shape, RowTarget(*a.probs),
        RowTarget(*a.intermediate_output), choice);
  });
  check_launch("fused_topk_with_score_function_fwd");
}
Refusal refuse_topk_fwd(const te_fl_fused_topk_with_score_function_fwd_args& a) {
  if (!all_dense(a.logits, a.expert_bias, a.probs, a.routing_map, a.routing_bits, a.topk_indices,
                 a.intermediate_output)) {
    return kNotContiguous;
  }
  const bool fits =
      backend::as_matrix(*a.logits).cols <= kMostExperts && a.num_groups <= kMostGroups;
  return fits ? nullptr : kTooMany;
}

void topk_bwd(const te_fl_context& ctx, const te_fl_fused_topk_with_score_function_bwd_args& a) {
  const backend::Matrix m = backend::as_matrix(*a.grad_probs);
  if (m.rows == 0) return;
  const RouterShape shape{m.rows,           static_cast<int>(m.cols), a.topk,          0, 0,
                          a.score_function, a.use_pre_softmax != 0,   a.scaling_factor};
  const ChoiceInputs choice{
      data_or_null<const uint8_t>(a.routing_map), data_or_null<const uint8_t>(a.routing_bits),
      data_or_null<const void>(a.topk_indices), index_bytes_of(a.topk_indices),
      open_value_errors(ctx, "fused_topk_with_score_function_bwd")};
  if (validates(ctx) && choice.map == nullptr && choice.bits == nullptr) {
    const int64_t size = m.rows * a.topk;
    check_indices_kernel<<<blocks_for(size), kThreads, 0, stream_of(ctx)>>>(choice, size,
                                                                            shape.experts);
    check_launch("check_indices_kernel");
    refuse_noted(ctx);
  }
  const RouterChoice lanes = choose_router(m.cols);
  with_lanes(lanes, [&]<int kLanes, int kPer>(std::integral_constant<int, kLanes>,
                                              std::integral_constant<int, kPer>) {
    topk_gradient_kernel<kLanes, kPer><<<lane_blocks(lanes, m.rows), kThreads, 0, stream_of(ctx)>>>(
        choice, RowSource(*a.intermediate_output), RowSource(*a.grad_probs), shape,
        RowTarget(*a.grad_logits));
  });
  check_launch("fused_topk_with_score_function_bwd");
}
Refusal refuse_topk_bwd(const te_fl_fused_topk_with_score_function_bwd_args& a) {
  if (!all_dense(a.routing_map, a.routing_bits, a.topk_indices, a.intermediate_output) ||
      !all_dense(a.grad_probs, a.grad_logits)) {
    return kNotContiguous;
  }
  if (overlaps_askew(*a.grad_logits, *a.grad_probs)) return kOverlaps;
  return backend::as_matrix(*a.grad_probs).cols <= kMostExperts ? nullptr : kTooMany;
}

void score_fwd(const te_fl_context& ctx, const te_fl_fused_score_for_moe_aux_loss_fwd_args& a) {
  const backend::Matrix m = backend::as_matrix(*a.logits);
  if (m.rows == 0) return;
  const RouterShape shape{m.rows, static_cast<int>(m.cols), a.topk, 0,
                          0,      a.score_function,         false,  1.0f};
  const ChoiceOutputs choice{data_or_null<uint8_t>(a.routing_map),
                             data_or_null<uint8_t>(a.routing_bits), nullptr, 4};
  const RouterChoice lanes = choose_router(m.cols);
  with_lanes(lanes, [&]<int kLanes, int kPer>(std::integral_constant<int, kLanes>,
                                              std::integral_constant<int, kPer>) {
    scores_kernel<kLanes, kPer><<<lane_blocks(lanes, m.rows), kThreads, 0, stream_of(ctx)>>>(
        RowSource(*a.logits), shape, RowTarget(*a.scores), RowTarget(*a.intermediate_output),
        choice);
  });
  check_launch("fused_score_for_moe_aux_loss_fwd");
}
Refusal refuse_score_fwd(const te_fl_fused_score_for_moe_aux_loss_fwd_args& a) {
  if (!all_dense(a.logits, a.scores, a.routing_map, a.routing_bits, a.intermediate_output)) {
    return kNotContiguous;
  }
  return backend::as_matrix(*a.logits).cols <= kMostExperts ? nullptr : kTooMany;
}

void score_bwd(const te_fl_context& ctx, const te_fl_fused_score_for_moe_aux_loss_bwd_args& a) {
  const backend::Matrix m = backend::as_matrix(*a.grad_scores);
  if (m.rows == 0 || m.cols == 0) return;
  const RouterShape shape{m.rows, static_cast<int>(m.cols), a.topk, 0,
                          0,      a.score_function,         false,  1.0f};
  const RouterChoice lanes = choose_router(m.cols);
  with_lanes(lanes, [&]<int kLanes, int kPer>(std::integral_constant<int, kLanes>,
                                              std::integral_constant<int, kPer>) {
    scores_gradient_kernel<kLanes, kPer>
        <<<lane_blocks(lanes, m.rows), kThreads, 0, stream_of(ctx)>>>(
            RowSource(*a.intermediate_output), RowSource(*a.grad_scores), shape,
            RowTarget(*a.grad_logits));
  });
  check_launch("fused_score_for_moe_aux_loss_bwd");
}
Refusal refuse_score_bwd(const te_fl_fused_score_for_moe_aux_loss_bwd_args& a) {
  if (!all_dense(a.intermediate_output, a.grad_scores, a.grad_logits)) return kNotContiguous;
  return backend::as_matrix(*a.grad_scores).cols <= kMostExperts ? nullptr : kTooMany;
}

// ---- auxiliary loss

LossShape loss_shape(const te_fl_tensor& t) {
  const backend::Matrix m = backend::as_matrix(t);
  const int64_t runs = std::max<int64_t>(1, ceil_div(m.cols, kGroup));
  return {m.rows, m.cols, static_cast<int>(std::min<int64_t>(runs, kThreads))};
}
unsigned loss_blocks(const LossShape& s) {
  return static_cast<unsigned>(std::clamp<int64_t>(ceil_div(s.tokens, s.down()), 1, kLossBlocks));
}

size_t aux_loss_workspace(const te_fl_context&, const te_fl_fused_moe_aux_loss_fwd_args&) {
  return kLossBlocks * sizeof(double);
}
void aux_loss_fwd(const te_fl_context& ctx, const te_fl_fused_moe_aux_loss_fwd_args& a) {
  const LossShape shape = loss_shape(*a.probs);
  const unsigned blocks = loss_blocks(shape);
  auto* sums = static_cast<double*>(ctx.workspace);
  loss_sums_kernel<<<blocks, kThreads, 0, stream_of(ctx)>>>(
      Source(*a.probs), Counts(*a.tokens_per_expert), shape, sums);
  check_launch("loss_sums_kernel");
  const LossNumbers numbers{static_cast<double>(a.coeff) * a.num_experts / a.topk,
                            a.total_num_tokens,
                            data_or_null<const int64_t>(a.total_num_tokens_tensor)};
  loss_kernel<<<1, kThreads, 0, stream_of(ctx)>>>(sums, static_cast<int>(blocks), numbers,
                                                  Target(*a.aux_loss),
                                                  backend::data<float>(*a.const_buf));
  check_launch("fused_moe_aux_loss_fwd");
}
Refusal refuse_aux_loss_fwd(const te_fl_fused_moe_aux_loss_fwd_args& a) {
  return all_dense(a.probs, a.tokens_per_expert) ? nullptr : kNotContiguous;
}

void aux_loss_bwd(const te_fl_context& ctx, const te_fl_fused_moe_aux_loss_bwd_args& a) {
  const LossShape shape = loss_shape(*a.grad_probs);
  if (shape.tokens == 0 || shape.experts == 0) return;
  loss_gradient_kernel<<<loss_blocks(shape), kThreads, 0, stream_of(ctx)>>>(
      backend::data<const float>(*a.const_buf), Counts(*a.tokens_per_expert),
      Source(*a.grad_aux_loss), shape, Target(*a.grad_probs));
  check_launch("fused_moe_aux_loss_bwd");
}
Refusal refuse_aux_loss_bwd(const te_fl_fused_moe_aux_loss_bwd_args& a) {
  return all_dense(a.tokens_per_expert, a.grad_probs) ? nullptr : kNotContiguous;
}

template <class Args, KernelNames kKernel>
std::string router_words(const te_fl_context&, const Args& a) {
  const te_fl_tensor* scores = nullptr;
  if constexpr (requires { a.logits; }) {
    scores = a.logits;
  } else if constexpr (requires { a.grad_probs; }) {
    scores = a.grad_probs;
  } else {
    scores = a.grad_scores;
  }
  return std::string(kKernel.text) + ": " + choose_router(backend::as_matrix(*scores).cols).text();
}
template <class Args, KernelNames kKernel>
constexpr auto describe_router = backend::describe_thunk<Args, router_words<Args, kKernel>>;

}  // namespace

void append_router(std::vector<te_fl_op_desc>& ops) {
  using TopkFwd = te_fl_fused_topk_with_score_function_fwd_args;
  using TopkBwd = te_fl_fused_topk_with_score_function_bwd_args;
  using ScoreFwd = te_fl_fused_score_for_moe_aux_loss_fwd_args;
  using ScoreBwd = te_fl_fused_score_for_moe_aux_loss_bwd_args;
  using LossFwd = te_fl_fused_moe_aux_loss_fwd_args;
  using LossBwd = te_fl_fused_moe_aux_loss_bwd_args;
  ops.push_back(
      descriptor<TopkFwd, topk_fwd, refuse_topk_fwd>("fused_topk_with_score_function_fwd"));
  ops.back().describe = describe_router<TopkFwd, "kernel topk">;
  ops.push_back(
      descriptor<TopkBwd, topk_bwd, refuse_topk_bwd>("fused_topk_with_score_function_bwd"));
  ops.back().describe = describe_router<TopkBwd, "kernel topk_gradient">;
  ops.push_back(
      descriptor<ScoreFwd, score_fwd, refuse_score_fwd>("fused_score_for_moe_aux_loss_fwd"));
  ops.back().describe = describe_router<ScoreFwd, "kernel scores">;
  ops.push_back(
      descriptor<ScoreBwd, score_bwd, refuse_score_bwd>("fused_score_for_moe_aux_loss_bwd"));
  ops.back().describe = describe_router<ScoreBwd, "kernel scores_gradient">;
  ops.push_back(descriptor<LossFwd, aux_loss_fwd, refuse_aux_loss_fwd>("fused_moe_aux_loss_fwd"));
  ops.back().describe = describe_by<LossFwd, "kernels loss_sums and loss">;
  ops.back().workspace = backend::workspace_thunk<LossFwd, aux_loss_workspace>;
  ops.push_back(descriptor<LossBwd, aux_loss_bwd, refuse_aux_loss_bwd>("fused_moe_aux_loss_bwd"));
  ops.back().describe = describe_by<LossBwd, "kernel loss_gradient">;
}

}  // namespace te_fl::cuda
