// The router ops and the auxiliary loss.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "activation.hpp"
#include "element.hpp"
#include "families.hpp"
#include "integers.hpp"
#include "te_fl/backend/values_in_memory.hpp"
#include "te_fl/ops/moe.h"

namespace te_fl::reference {
namespace {

using Values = std::vector<double>;

constexpr double kEpsilon = 1e-20;

// ---- scores

double sqrt_softplus(double x) {
  return std::sqrt((x < 0.0 ? 0.0 : x) + std::log1p(std::exp(-std::fabs(x))));
}

void softmax(Values& x) {
  double top = -std::numeric_limits<double>::infinity(), sum = 0.0;
  for (const double v : x) top = v > top || std::isnan(v) ? v : top;
  for (double& v : x) sum += v = std::exp(v - top);
  for (double& v : x) v /= sum;
}

double sum_of(const Values& x) { return std::accumulate(x.begin(), x.end(), 0.0); }

// Rounds scores to FP32, because the choice compares FP32 scores.
void round_to_f32(Values& x) {
  for (double& v : x) v = static_cast<float>(v);
}

// ---- choice

// True if a is larger than b, where NaN is larger than every number.
bool larger(double a, double b) { return std::isnan(a) ? !std::isnan(b) : a > b; }

// Returns the indices of the k largest elements of x[begin, end), in descending order of the
// elements. Of equal elements, the lower index comes first.
std::vector<int64_t> largest(const Values& x, int64_t begin, int64_t end, int64_t k) {
  std::vector<int64_t> at(static_cast<size_t>(end - begin));
  std::iota(at.begin(), at.end(), begin);
  std::stable_sort(at.begin(), at.end(), [&](int64_t i, int64_t j) {
    return larger(x[static_cast<size_t>(i)], x[static_cast<size_t>(j)]);
  });
  at.resize(static_cast<size_t>(k));
  return at;
}

// Returns the experts with the topk largest scores x. With groups, only experts in the best groups
// are candidates.
std::vector<int64_t> choose(const Values& x,
                            const te_fl_fused_topk_with_score_function_fwd_args& a) {
  const auto experts = static_cast<int64_t>(x.size());
  if (a.num_groups == 0) return largest(x, 0, experts, a.topk);
  const int64_t size = experts / a.num_groups;
  Values scores;
  for (int64_t g = 0; g < a.num_groups; ++g) {
    float sum = 0.0f;
    for (int64_t e : largest(x, g * size, (g + 1) * size, a.topk / a.group_topk)) {
      sum += static_cast<float>(x[static_cast<size_t>(e)]);
    }
    scores.push_back(sum);
  }
  std::vector<int64_t> groups = largest(scores, 0, a.num_groups, a.group_topk);
  std::sort(groups.begin(), groups.end());
  Values left;
  std::vector<int64_t> expert_of;
  for (int64_t g : groups) {
    for (int64_t e = g * size; e < (g + 1) * size; ++e) {
      left.push_back(x[static_cast<size_t>(e)]);
      expert_of.push_back(e);
    }
  }
  std::vector<int64_t> chosen = largest(left, 0, static_cast<int64_t>(left.size()), a.topk);
  for (int64_t& e : chosen) e = expert_of[static_cast<size_t>(e)];
  return chosen;
}

// Writes the chosen experts in the forms that a call requests.
template <class Args>
void write_choice(const Args& a, const std::vector<std::vector<int64_t>>& chosen, int64_t experts) {
  const int64_t bytes = (experts + 7) / 8;
  std::vector<int64_t> map(chosen.size() * static_cast<size_t>(experts), 0);
  std::vector<int64_t> bits(chosen.size() * static_cast<size_t>(bytes), 0);
  for (size_t t = 0; t < chosen.size(); ++t) {
    for (int64_t e : chosen[t]) {
      map[t * static_cast<size_t>(experts) + static_cast<size_t>(e)] = 1;
      bits[t * static_cast<size_t>(bytes) + static_cast<size_t>(e / 8)] |= int64_t{1} << e % 8;
    }
  }
  if (a.routing_map != nullptr) write_integers(*a.routing_map, map);
  if (a.routing_bits != nullptr) write_integers(*a.routing_bits, bits);
}

// ---- probabilities

Values read_row(const Reader& reader, int64_t row, int64_t cols) {
  Values values(static_cast<size_t>(cols));
  reader.read(row * cols, cols, values.data());
  return values;
}
void put_row(const te_fl_tensor& t, int64_t row, const Values& values) {
  const std::vector<float> rounded(values.begin(), values.end());
  Writer(t).write(row * static_cast<int64_t>(values.size()), static_cast<int64_t>(values.size()),
                  rounded.data());
}

Values compute_scores(const Values& logits, int function) {
  Values s = logits;
  if (function == TE_FL_SCORE_FUNCTION_SOFTMAX) {
    softmax(s);
  } else {
    for (double& v : s)
      v = function == TE_FL_SCORE_FUNCTION_SIGMOID ? sigmoid(v) : sqrt_softplus(v);
  }
  round_to_f32(s);
  return s;
}

void topk_fwd(const te_fl_context&, const te_fl_fused_topk_with_score_function_fwd_args& a) {
  const backend::Matrix m = backend::as_matrix(*a.logits);
  const Reader logits(*a.logits);
  const Values bias = a.expert_bias != nullptr ? Reader(*a.expert_bias).all_double() : Values();
  const bool is_softmax = a.score_function == TE_FL_SCORE_FUNCTION_SOFTMAX;
  const bool after = is_softmax && a.use_pre_softmax == 0;
  std::vector<std::vector<int64_t>> chosen;
  std::vector<int64_t> indices;
  for (int64_t t = 0; t < m.rows; ++t) {
    const Values x = read_row(logits, t, m.cols);
    const Values scores = after ? x : compute_scores(x, a.score_function);
    Values biased = scores;
    for (size_t e = 0; e < bias.size(); ++e) biased[e] += bias[e];
    round_to_f32(biased);
    chosen.push_back(choose(biased, a));
    indices.insert(indices.end(), chosen.back().begin(), chosen.back().end());

    Values p;
    for (int64_t e : chosen.back()) p.push_back(scores[static_cast<size_t>(e)]);
    if (after) softmax(p);
    const double sum = !is_softmax && a.topk > 1 ? sum_of(p) + kEpsilon : 1.0;
    Values probs(x.size(), 0.0);
    Values saved = a.score_function == TE_FL_SCORE_FUNCTION_SQRTSOFTPLUS ? x : scores;
    if (after) std::fill(saved.begin(), saved.end(), -std::numeric_limits<double>::infinity());
    for (size_t i = 0; i < p.size(); ++i) {
      const auto e = static_cast<size_t>(chosen.back()[i]);
      probs[e] = static_cast<double>(a.scaling_factor) * (p[i] / sum);
      if (after) saved[e] = p[i];
    }
    put_row(*a.probs, t, probs);
    put_row(*a.intermediate_output, t, saved);
  }
  write_choice(a, chosen, m.cols);
  if (a.topk_indices != nullptr) write_integers(*a.topk_indices, indices);
}

// Returns the choice of experts as one byte per token and expert, 1 if chosen.
std::vector<uint8_t> chosen_experts(const te_fl_fused_topk_with_score_function_bwd_args& a,
                                    const backend::Matrix& m) {
  std::vector<uint8_t> chosen(static_cast<size_t>(m.rows * m.cols), 0);
  if (a.routing_map != nullptr) {
    const std::vector<int64_t> map = integers(*a.routing_map);
    for (size_t i = 0; i < map.size(); ++i) chosen[i] = map[i] != 0;
  } else if (a.routing_bits != nullptr) {
    const std::vector<int64_t> bits = integers(*a.routing_bits);
    for (int64_t i = 0; i < m.rows * m.cols; ++i) {
      const int64_t e = i % m.cols, byte = i / m.cols * ((m.cols + 7) / 8) + e / 8;
      chosen[static_cast<size_t>(i)] = bits[static_cast<size_t>(byte)] >> e % 8 & 1;
    }
  } else {
    const std::vector<int64_t> indices = integers(*a.topk_indices);
    for (size_t i = 0; i < indices.size(); ++i) {
      if (indices[i] < 0 || indices[i] >= m.cols) {
        backend::wrong_value("topk_indices", static_cast<int64_t>(i), indices[i], 0, m.cols,
                             ", the experts");
      }
      chosen[i / static_cast<size_t>(a.topk) * static_cast<size_t>(m.cols) +
             static_cast<size_t>(indices[i])] = 1;
    }
  }
  return chosen;
}

// ---- gradients. In the functions below, counts[e] is nonzero if the sums include expert e.

// On entry g is the gradient of y = f / (sum + epsilon); on return it is the gradient of f.
void divided_gradient(Values& g, const Values& f, const uint8_t* counts) {
  double sum = kEpsilon, dot = 0.0;
  for (size_t e = 0; e < g.size(); ++e) {
    if (counts[e] != 0) sum += f[e], dot += g[e] * f[e];
  }
  for (size_t e = 0; e < g.size(); ++e)
    g[e] = counts[e] != 0 ? g[e] / sum - dot / (sum * sum) : 0.0;
}

void softmax_gradient(Values& g, const Values& y, const uint8_t* counts) {
  double dot = 0.0;
  for (size_t e = 0; e < g.size(); ++e) dot += counts[e] != 0 ? g[e] * y[e] : 0.0;
  for (size_t e = 0; e < g.size(); ++e) g[e] = counts[e] != 0 ? y[e] * (g[e] - dot) : 0.0;
}

// Turns g, the gradient of the scores, into the gradient of the logits. `divides`: the scores were
// divided by their sum over the experts of `counts`.
void score_gradient(Values& g, const Values& saved, int function, bool divides,
                    const uint8_t* counts) {
  if (function == TE_FL_SCORE_FUNCTION_SIGMOID) {
    if (divides) divided_gradient(g, saved, counts);
    for (size_t e = 0; e < g.size(); ++e) g[e] *= saved[e] * (1.0 - saved[e]);
    return;
  }
  Values y = saved;
  for (double& v : y) v = static_cast<float>(sqrt_softplus(v));
  if (divides) divided_gradient(g, y, counts);
  for (size_t e = 0; e < g.size(); ++e) g[e] *= sigmoid(saved[e]) / (2.0 * y[e] + kEpsilon);
}

void topk_bwd(const te_fl_context&, const te_fl_fused_topk_with_score_function_bwd_args& a) {
  const backend::Matrix m = backend::as_matrix(*a.grad_probs);
  const std::vector<uint8_t> choice = chosen_experts(a, m);
  if (m.rows == 0) return;
  const std::vector<uint8_t> all(static_cast<size_t>(m.cols), 1);
  const Reader grads(*a.grad_probs), saved(*a.intermediate_output);
  for (int64_t t = 0; t < m.rows; ++t) {
    const uint8_t* chosen = choice.data() + t * m.cols;
    Values g = read_row(grads, t, m.cols);
    const Values y = read_row(saved, t, m.cols);
    for (size_t e = 0; e < g.size(); ++e) {
      g[e] = chosen[e] != 0 ? g[e] * static_cast<double>(a.scaling_factor) : 0.0;
    }
    if (a.score_function == TE_FL_SCORE_FUNCTION_SOFTMAX) {
      softmax_gradient(g, y, a.use_pre_softmax != 0 ? all.data() : chosen);
    } else {
      score_gradient(g, y, a.score_function, a.topk > 1, chosen);
    }
    for (size_t e = 0; e < g.size(); ++e) {
      // Overrides the NaN of 0 times infinity.
      if (chosen[e] == 0 && a.use_pre_softmax == 0) g[e] = 0.0;
    }
    put_row(*a.grad_logits, t, g);
  }
}

void score_fwd(const te_fl_context&, const te_fl_fused_score_for_moe_aux_loss_fwd_args& a) {
  const backend::Matrix m = backend::as_matrix(*a.logits);
  const Reader logits(*a.logits);
  std::vector<std::vector<int64_t>> chosen;
  for (int64_t t = 0; t < m.rows; ++t) {
    const Values x = read_row(logits, t, m.cols);
    Values s = compute_scores(x, a.score_function);
    put_row(*a.intermediate_output, t,
            a.score_function == TE_FL_SCORE_FUNCTION_SQRTSOFTPLUS ? x : s);
    if (a.score_function != TE_FL_SCORE_FUNCTION_SOFTMAX) {
      const double sum = sum_of(s) + kEpsilon;
      for (double& v : s) v /= sum;
      round_to_f32(s);
    }
    put_row(*a.scores, t, s);
    chosen.push_back(largest(s, 0, m.cols, a.topk));
  }
  write_choice(a, chosen, m.cols);
}

void score_bwd(const te_fl_context&, const te_fl_fused_score_for_moe_aux_loss_bwd_args& a) {
  const backend::Matrix m = backend::as_matrix(*a.grad_scores);
  if (m.rows == 0) return;
  const std::vector<uint8_t> all(static_cast<size_t>(m.cols), 1);
  const Reader grads(*a.grad_scores), saved(*a.intermediate_output);
  for (int64_t t = 0; t < m.rows; ++t) {
    Values g = read_row(grads, t, m.cols);
    const Values y = read_row(saved, t, m.cols);
    if (a.score_function == TE_FL_SCORE_FUNCTION_SOFTMAX) {
      softmax_gradient(g, y, all.data());
    } else {
      score_gradient(g, y, a.score_function, true, all.data());
    }
    put_row(*a.grad_logits, t, g);
  }
}

// ---- auxiliary loss

// The values of an integer or float tensor in double.
Values numbers(const te_fl_tensor& t) {
  if (dtype_of(t) != TE_FL_I32 && dtype_of(t) != TE_FL_I64) return Reader(t).all_double();
  const std::vector<int64_t> values = integers(t);
  return Values(values.begin(), values.end());
}

void aux_loss_fwd(const te_fl_context&, const te_fl_fused_moe_aux_loss_fwd_args& a) {
  const backend::Matrix m = backend::as_matrix(*a.probs);
  const double total = a.total_num_tokens_tensor != nullptr
                           ? numbers(*a.total_num_tokens_tensor)[0]
                           : static_cast<double>(a.total_num_tokens);
  const auto c =
      static_cast<float>(static_cast<double>(a.coeff) * a.num_experts / a.topk / total / total);
  const Values tokens = numbers(*a.tokens_per_expert);
  const Reader probs(*a.probs);
  double sum = 0.0;
  for (int64_t t = 0; t < m.rows; ++t) {
    const Values p = read_row(probs, t, m.cols);
    for (size_t e = 0; e < p.size(); ++e) sum += p[e] * tokens[e];
  }
  Writer(*a.const_buf).set(0, c);
  Writer(*a.aux_loss).set(0, static_cast<float>(static_cast<double>(c) * sum));
}

void aux_loss_bwd(const te_fl_context&, const te_fl_fused_moe_aux_loss_bwd_args& a) {
  const backend::Matrix m = backend::as_matrix(*a.grad_probs);
  Values row = numbers(*a.tokens_per_expert);
  const double factor = double{Reader(*a.const_buf)[0]} * double{Reader(*a.grad_aux_loss)[0]};
  for (double& v : row) v *= factor;
  for (int64_t t = 0; t < m.rows; ++t) put_row(*a.grad_probs, t, row);
}

}  // namespace

void append_router(std::vector<te_fl_op_desc>& ops) {
  ops.push_back(descriptor<te_fl_fused_topk_with_score_function_fwd_args, topk_fwd>(
      "fused_topk_with_score_function_fwd"));
  ops.push_back(descriptor<te_fl_fused_topk_with_score_function_bwd_args, topk_bwd>(
      "fused_topk_with_score_function_bwd"));
  ops.push_back(descriptor<te_fl_fused_score_for_moe_aux_loss_fwd_args, score_fwd>(
      "fused_score_for_moe_aux_loss_fwd"));
  ops.push_back(descriptor<te_fl_fused_score_for_moe_aux_loss_bwd_args, score_bwd>(
      "fused_score_for_moe_aux_loss_bwd"));
  ops.push_back(
      descriptor<te_fl_fused_moe_aux_loss_fwd_args, aux_loss_fwd>("fused_moe_aux_loss_fwd"));
  ops.push_back(
      descriptor<te_fl_fused_moe_aux_loss_bwd_args, aux_loss_bwd>("fused_moe_aux_loss_bwd"));
}

}  // namespace te_fl::reference
