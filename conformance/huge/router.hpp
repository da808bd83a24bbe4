// The expert router and its auxiliary loss on huge tensors.
#pragma once

#include "conformance/huge/cases.hpp"
#include "conformance/oracle_router.hpp"
#include "te_fl/ops/moe.h"

namespace te_fl::huge::router_calls {

using conformance::Numbers;
using conformance::RouterOptions;

constexpr int64_t kTop = 4;

inline Numbers read_row(const Pattern& pattern, int64_t row, int64_t cols) {
  Numbers x;
  for (int64_t c = 0; c < cols; ++c) x.push_back(double{pattern.at(row * cols + c)});
  return x;
}

// Tests the expert selection with sigmoid scores of BF16 logits. Two scores are either equal (a
// tie) or clearly different.
inline void choose(Run& run, int64_t experts) {
  const Pattern pattern(1);
  const int64_t rows = run.rows(experts, 1);
  const Tensor x = run.input({rows, experts}, pattern), probs = run.output({rows, experts});
  const Tensor map = run.output({rows, experts}, DType::kU8);
  const Tensor saved = run.output({rows, experts}, DType::kF32);
  if (run.failed()) return;
  te_fl_fused_topk_with_score_function_fwd_args args{};
  args.logits = x, args.probs = probs, args.routing_map = map, args.intermediate_output = saved;
  args.topk = kTop, args.score_function = TE_FL_SCORE_FUNCTION_SIGMOID;
  run.call("fused_topk_with_score_function_fwd", &args);
  const RouterOptions options{.function = TE_FL_SCORE_FUNCTION_SIGMOID, .topk = kTop};
  int64_t row = -1;
  conformance::Routed routed;
  const auto at = [&](int64_t i) {
    if (i / experts != row) {
      row = i / experts;
      routed = conformance::route(read_row(pattern, row, experts), {}, options);
    }
    return static_cast<size_t>(i % experts);
  };
  run.expect(
      probs, "probs", [&](int64_t i) { return routed.probs[at(i)]; }, 0x1p-8, 1e-6);
  run.expect(
      map, "routing_map",
      [&](int64_t i) {
        const auto e = static_cast<int64_t>(at(i));
        return std::count(routed.chosen.begin(), routed.chosen.end(), e);
      },
      0, 0);
  run.expect(
      saved, "intermediate_output", [&](int64_t i) { return routed.saved[at(i)]; }, 1e-5, 1e-6);
}

inline void choice_gradient(Run& run, int64_t experts) {
  const Pattern grad(1), logits(2);
  const int64_t rows = run.rows(experts, 1);
  const Tensor dy = run.input({rows, experts}, grad), dx = run.output({rows, experts});
  const Tensor saved = run.input({rows, experts}, logits, DType::kF32);
  const Tensor map = run.output({rows, experts}, DType::kU8);
  std::vector<uint8_t> chosen(static_cast<size_t>(experts), 0);
  for (int64_t e = 0; e < experts; e += experts / kTop) chosen[static_cast<size_t>(e)] = 1;
  run.repeat(map, chosen);
  if (run.failed()) return;
  te_fl_fused_topk_with_score_function_bwd_args args{};
  args.routing_map = map, args.intermediate_output = saved, args.grad_probs = dy;
  args.grad_logits = dx, args.topk = kTop;
  args.score_function = TE_FL_SCORE_FUNCTION_SQRTSOFTPLUS;
  run.call("fused_topk_with_score_function_bwd", &args);
  int64_t row = -1;
  conformance::RowGradient want;
  run.expect_near(dx, "grad_logits", [&](int64_t i) {
    if (i / experts != row) {
      row = i / experts;
      want =
          conformance::score_gradient(read_row(grad, row, experts), read_row(logits, row, experts),
                                      chosen, TE_FL_SCORE_FUNCTION_SQRTSOFTPLUS, true);
    }
    const auto e = static_cast<size_t>(i % experts);
    return Near{want.value[e], 0x1p-8 * std::fabs(want.value[e]) + 1e-5 * want.size[e] + 1e-7};
  });
}

inline void scores(Run& run, int64_t experts) {
  const Pattern pattern(1);
  const int64_t rows = run.rows(experts, 1);
  const Tensor x = run.input({rows, experts}, pattern);
  const Tensor y = run.output({rows, experts}, DType::kF32);
  const Tensor saved = run.output({rows, experts}, DType::kF32);
  if (run.failed()) return;
  te_fl_fused_score_for_moe_aux_loss_fwd_args args{};
  args.logits = x, args.scores = y, args.intermediate_output = saved, args.topk = kTop;
  args.score_function = TE_FL_SCORE_FUNCTION_SOFTMAX;
  run.call("fused_score_for_moe_aux_loss_fwd", &args);
  int64_t row = -1;
  Numbers want;
  run.expect(
      y, "scores",
      [&](int64_t i) {
        if (i / experts != row) {
          row = i / experts, want = conformance::softmax_values(read_row(pattern, row, experts));
        }
        return want[static_cast<size_t>(i % experts)];
      },
      1e-5, 1e-7);
}

inline void scores_gradient(Run& run, int64_t experts) {
  const Pattern grad(1), logits(2);
  const int64_t rows = run.rows(experts, 1);
  const Tensor dy = run.input({rows, experts}, grad, DType::kF32);
  const Tensor saved = run.input({rows, experts}, logits, DType::kF32);
  const Tensor dx = run.output({rows, experts});
  if (run.failed()) return;
  te_fl_fused_score_for_moe_aux_loss_bwd_args args{};
  args.intermediate_output = saved, args.grad_scores = dy, args.grad_logits = dx, args.topk = kTop;
  args.score_function = TE_FL_SCORE_FUNCTION_SQRTSOFTPLUS;
  run.call("fused_score_for_moe_aux_loss_bwd", &args);
  const std::vector<uint8_t> all(static_cast<size_t>(experts), 1);
  int64_t row = -1;
  conformance::RowGradient want;
  run.expect_near(dx, "grad_logits", [&](int64_t i) {
    if (i / experts != row) {
      row = i / experts;
      want =
          conformance::score_gradient(read_row(grad, row, experts), read_row(logits, row, experts),
                                      all, TE_FL_SCORE_FUNCTION_SQRTSOFTPLUS, true);
    }
    const auto e = static_cast<size_t>(i % experts);
    return Near{want.value[e], 0x1p-8 * std::fabs(want.value[e]) + 1e-5 * want.size[e] + 1e-7};
  });
}

// Token counts that differ between neighbouring experts.
inline std::vector<int32_t> make_counts(int64_t experts) {
  std::vector<int32_t> counts;
  for (int64_t e = 0; e < experts; ++e) counts.push_back(static_cast<int32_t>(e % 7));
  return counts;
}

inline void loss(Run& run, int64_t experts) {
  const Pattern pattern(1, true);
  const int64_t rows = run.rows(experts, 1);
  const std::vector<int32_t> counts = make_counts(experts);
  const Tensor x = run.input({rows, experts}, pattern, DType::kF32), n = run.integers(counts);
  const Tensor y = run.output({1}, DType::kF32), c = run.output({1}, DType::kF32);
  if (run.failed()) return;
  te_fl_fused_moe_aux_loss_fwd_args args{};
  args.probs = x, args.tokens_per_expert = n, args.aux_loss = y, args.const_buf = c;
  args.total_num_tokens = rows, args.num_experts = static_cast<int32_t>(experts), args.topk = kTop;
  run.call("fused_moe_aux_loss_fwd", &args);
  const double factor =
      static_cast<double>(experts) / kTop / static_cast<double>(rows) / static_cast<double>(rows);
  double sum = 0;
  for (int64_t i = 0; i < rows * experts; ++i) {
    sum += double{pattern.at(i)} * counts[static_cast<size_t>(i % experts)];
  }
  run.expect(
      y, "aux_loss", [&](int64_t) { return factor * sum; }, 2e-5, 0);
  run.expect(
      c, "const_buf", [&](int64_t) { return factor; }, 1e-6, 0);
}

inline void loss_gradient(Run& run, int64_t experts) {
  const Pattern one(1, true);
  const int64_t rows = run.rows(experts, 1);
  const std::vector<int32_t> counts = make_counts(experts);
  const Tensor c = run.input({1}, one, DType::kF32), dy = run.input({1}, one);
  const Tensor n = run.integers(counts), dx = run.output({rows, experts});
  if (run.failed()) return;
  te_fl_fused_moe_aux_loss_bwd_args args{};
  args.const_buf = c, args.tokens_per_expert = n, args.grad_aux_loss = dy, args.grad_probs = dx;
  run.call("fused_moe_aux_loss_bwd", &args);
  run.expect(dx, "grad_probs", [&](int64_t i) {
    return double{one.at(0)} * one.at(0) * counts[static_cast<size_t>(i % experts)];
  });
}

}  // namespace te_fl::huge::router_calls
