// The router ops and the auxiliary loss. The thread pool processes ranges of tokens; each token's
// row of experts is processed by one thread.
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "integers.hpp"
#include "loss_kernels.hpp"
#include "quant_store.hpp"
#include "router_kernels.hpp"
#include "te_fl/backend/values_in_memory.hpp"
#include "te_fl/ops/moe.h"

namespace te_fl::cpu {
namespace {

constexpr float kEpsilon = 1e-20f;

// A padded buffer for one row of experts, used by one thread.
using Row = std::vector<float>;
Row row_for(int64_t experts) { return Row(static_cast<size_t>(padded(experts)), 0.0f); }

void store_row(const te_fl_tensor& t, int64_t row, int64_t experts, const Row& values) {
  store_f32(dtype_of(t), values.data(), experts,
            element(backend::data<void>(t), row * experts, element_bytes(t)));
}

// ---- choice

// Returns a sort key with the order of the values. NaN has the highest key, and of equal values the
// one with the lower index has the higher key.
uint64_t pack_key(float value, int64_t index) {
  const auto bits = std::bit_cast<uint32_t>(value + 0.0f);  // turns -0 into +0
  uint32_t ordered = (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
  if (std::isnan(value)) ordered = 0xFFFFFFFFu;
  return uint64_t{ordered} << 32 | (0xFFFFFFFFu - static_cast<uint32_t>(index));
}
int64_t unpack_index(uint64_t key) { return 0xFFFFFFFFu - static_cast<uint32_t>(key); }

using Keys = std::vector<uint64_t>;
void keep_largest(Keys& keys, int64_t k) {
  const auto end = keys.begin() + k;
  if (end != keys.end()) std::nth_element(keys.begin(), end, keys.end(), std::greater<>());
  keys.erase(end, keys.end());
  std::sort(keys.begin(), keys.end(), std::greater<>());
}

// Chooses the experts of one row at a time. Each thread has its own object.
class Chooser {
 public:
  Chooser(int64_t experts, int64_t topk, int64_t groups, int64_t group_topk)
      : experts_(experts), topk_(topk), groups_(groups), group_topk_(group_topk) {}

  // Returns the keys of the topk largest elements of x, in descending order.
  const Keys& choose(const float* x) {
    keys_.clear();
    if (groups_ == 0) {
      for (int64_t e = 0; e < experts_; ++e) keys_.push_back(pack_key(x[e], e));
    } else {
      const int64_t size = experts_ / groups_;
      best_.clear();
      for (int64_t g = 0; g < groups_; ++g) best_.push_back(pack_key(group_score(x, g, size), g));
      keep_largest(best_, group_topk_);
      keys_.clear();
      for (const uint64_t group : best_) {
        const int64_t first = unpack_index(group) * size;
        for (int64_t e = first; e < first + size; ++e) keys_.push_back(pack_key(x[e], e));
      }
    }
    keep_largest(keys_, topk_);
    return keys_;
  }

 private:
  float group_score(const float* x, int64_t group, int64_t size) {
    keys_.clear();
    for (int64_t e = group * size; e < (group + 1) * size; ++e) keys_.push_back(pack_key(x[e], e));
    keep_largest(keys_, topk_ / group_topk_);
    float sum = 0.0f;
    for (const uint64_t key : keys_) sum += x[unpack_index(key)];
    return sum;
  }

  int64_t experts_, topk_, groups_, group_topk_;
  Keys keys_, best_;
};

void clear_bytes(const te_fl_tensor* t) {
  if (t == nullptr) return;
  std::fill_n(backend::data<uint8_t>(*t), backend::numel(*t), uint8_t{0});
}

// Writes the chosen experts in the forms that a call requests.
struct ChoiceWriter {
  uint8_t *map, *bits;
  const te_fl_tensor* indices;
  int64_t experts;

  ChoiceWriter(const te_fl_tensor* m, const te_fl_tensor* b, const te_fl_tensor* i, int64_t e)
      : map(m != nullptr ? backend::data<uint8_t>(*m) : nullptr),
        bits(b != nullptr ? backend::data<uint8_t>(*b) : nullptr),
        indices(i),
        experts(e) {
    clear_bytes(m), clear_bytes(b);
  }
  void put(int64_t row, const Keys& chosen) const {
    for (size_t i = 0; i < chosen.size(); ++i) {
      const int64_t e = unpack_index(chosen[i]);
      if (map != nullptr) map[row * experts + e] = 1;
      if (bits != nullptr) {
        bits[row * ((experts + 7) / 8) + e / 8] |= static_cast<uint8_t>(1u << e % 8);
      }
      if (indices == nullptr) continue;
      const int64_t at = row * static_cast<int64_t>(chosen.size()) + static_cast<int64_t>(i);
      switch (dtype_of(*indices)) {
        case TE_FL_I16:
          backend::data<int16_t>(*indices)[at] = static_cast<int16_t>(e);
          break;
        case TE_FL_I32:
          backend::data<int32_t>(*indices)[at] = static_cast<int32_t>(e);
          break;
        default:
          backend::data<int64_t>(*indices)[at] = e;
      }
    }
  }
};

// ---- scores

// Replaces x by softmax(x). Its padding becomes undefined.
void softmax_row(float* x, int64_t n) {
  const float top = running_max(-std::numeric_limits<float>::infinity(), x, n);
  exp_gradient(x, n, top, 0.0f, 1.0f, x);
  double sum = 0.0;
  for (int64_t i = 0; i < n; ++i) sum += x[i];
  for (int64_t i = 0; i < n; ++i) x[i] = static_cast<float>(x[i] / sum);
}

void scores_row(const float* x, int64_t n, int function, float* s) {
  if (function == TE_FL_SCORE_FUNCTION_SIGMOID) return sigmoid_f32(x, n, s);
  if (function == TE_FL_SCORE_FUNCTION_SQRTSOFTPLUS) return sqrt_softplus_f32(x, n, s);
  std::copy_n(x, n, s);
  softmax_row(s, n);
}

// Calls f for ranges that cover all rows, on the pool.
template <class F>
void for_each_row(int64_t rows, int64_t cols, F&& f) {
  ThreadPool::instance().parallel_for(rows, grain_of_rows(8 * cols), std::forward<F>(f));
}

void topk_fwd(const te_fl_context&, const te_fl_fused_topk_with_score_function_fwd_args& a) {
  const backend::Matrix m = backend::as_matrix(*a.logits);
  const auto* bias =
      a.expert_bias != nullptr ? backend::data<const float>(*a.expert_bias) : nullptr;
  const bool is_softmax = a.score_function == TE_FL_SCORE_FUNCTION_SOFTMAX;
  const bool after = is_softmax && a.use_pre_softmax == 0;
  const Loader logits(*a.logits);
  const ChoiceWriter writer(a.routing_map, a.routing_bits, a.topk_indices, m.cols);
  for_each_row(m.rows, m.cols, [&](int64_t begin, int64_t end) {
    Chooser chooser(m.cols, a.topk, a.num_groups, a.group_topk);
    Row x = row_for(m.cols), s = x, biased = x, probs = x, chosen_scores = row_for(a.topk);
    for (int64_t t = begin; t < end; ++t) {
      logits(t * m.cols, m.cols, x.data());
      if (!after) scores_row(x.data(), m.cols, a.score_function, s.data());
      const Row& scores = after ? x : s;
      for (int64_t e = 0; bias != nullptr && e < m.cols; ++e) biased[e] = scores[e] + bias[e];
      const Keys& chosen = chooser.choose(bias != nullptr ? biased.data() : scores.data());
      writer.put(t, chosen);
      double sum = 0.0;
      for (int32_t i = 0; i < a.topk; ++i) {
        sum += chosen_scores[i] = scores[static_cast<size_t>(unpack_index(chosen[i]))];
      }
      if (after) softmax_row(chosen_scores.data(), a.topk);
      const double divisor = !is_softmax && a.topk > 1 ? sum + double{kEpsilon} : 1.0;
      std::fill(probs.begin(), probs.end(), 0.0f);
      if (after) std::fill(s.begin(), s.end(), -std::numeric_limits<float>::infinity());
      for (int32_t i = 0; i < a.topk; ++i) {
        const auto e = static_cast<size_t>(unpack_index(chosen[i]));
        probs[e] = static_cast<float>(double{a.scaling_factor} * (chosen_scores[i] / divisor));
        if (after) s[e] = chosen_scores[i];
      }
      store_row(*a.probs, t, m.cols, probs);
      const bool saves_logits = a.score_function == TE_FL_SCORE_FUNCTION_SQRTSOFTPLUS;
      store_row(*a.intermediate_output, t, m.cols, saves_logits ? x : s);
    }
  });
}
Refusal refuse_topk_fwd(const te_fl_fused_topk_with_score_function_fwd_args& a) {
  return all_dense(a.logits, a.expert_bias, a.probs, a.routing_map, a.routing_bits, a.topk_indices,
                   a.intermediate_output)
             ? nullptr
             : kNotContiguous;
}

// ---- gradients. In the functions below, counts[e] is nonzero if the sums include expert e.

struct ChoiceReader {
  const te_fl_fused_topk_with_score_function_bwd_args& a;
  int64_t experts;

  int64_t index(int64_t at) const {
    switch (dtype_of(*a.topk_indices)) {
      case TE_FL_I16:
        return backend::data<const int16_t>(*a.topk_indices)[at];
      case TE_FL_I32:
        return backend::data<const int32_t>(*a.topk_indices)[at];
      default:
        return backend::data<const int64_t>(*a.topk_indices)[at];
    }
  }
  void check() const {
    if (a.routing_map != nullptr || a.routing_bits != nullptr) return;
    for (int64_t i = 0; i < backend::numel(*a.topk_indices); ++i) {
      const int64_t e = index(i);
      if (e >= 0 && e < experts) continue;
      backend::wrong_value("topk_indices", i, e, 0, experts, ", the experts");
    }
  }
  void read(int64_t row, uint8_t* chosen) const {
    if (a.routing_map != nullptr) {
      std::copy_n(backend::data<const uint8_t>(*a.routing_map) + row * experts, experts, chosen);
    } else if (a.routing_bits != nullptr) {
      const auto* bits = backend::data<const uint8_t>(*a.routing_bits) + row * ((experts + 7) / 8);
      for (int64_t e = 0; e < experts; ++e) chosen[e] = bits[e / 8] >> e % 8 & 1;
    } else {
      std::fill_n(chosen, experts, uint8_t{0});
      for (int32_t i = 0; i < a.topk; ++i) chosen[index(row * a.topk + i)] = 1;
    }
  }
};

struct Sums {
  double values = 0.0, products = 0.0;
};
Sums compute_sums(const Row& g, const Row& y, const uint8_t* counts, int64_t n) {
  Sums sums;
  for (int64_t e = 0; e < n; ++e) {
    if (counts[e] != 0) sums.values += y[e], sums.products += double{g[e]} * y[e];
  }
  return sums;
}

// Turns g, the gradient of the scores, into the gradient of the logits. Overwrites `saved` and
// `scratch`.
void gradient_row(Row& g, Row& saved, const uint8_t* counts, int function, bool divides, int64_t n,
                  Row& scratch) {
  const bool plain = function != TE_FL_SCORE_FUNCTION_SQRTSOFTPLUS;
  if (!plain) sqrt_softplus_f32(saved.data(), n, scratch.data());
  const Row& y = plain ? saved : scratch;
  if (function == TE_FL_SCORE_FUNCTION_SOFTMAX) {
    const double dot = compute_sums(g, y, counts, n).products;
    for (int64_t e = 0; e < n; ++e) {
      g[e] = counts[e] != 0 ? static_cast<float>(y[e] * (g[e] - dot)) : 0.0f;
    }
    return;
  }
  if (divides) {
    const Sums sums = compute_sums(g, y, counts, n);
    const double sum = sums.values + double{kEpsilon}, less = sums.products / (sum * sum);
    for (int64_t e = 0; e < n; ++e) {
      g[e] = counts[e] != 0 ? static_cast<float>(g[e] / sum - less) : 0.0f;
    }
  }
  if (plain) {
    for (int64_t e = 0; e < n; ++e) g[e] *= y[e] * (1.0f - y[e]);
    return;
  }
  sigmoid_f32(saved.data(), n, saved.data());
  // Computes in double: the derivative is at most about 1, but its factors, and gradients divided
  // by small sums, are near the limits of FP32's range. Where sigmoid(x) would underflow in FP32, y
  // * y is used in its place.
  constexpr float kSmall = 4e-18f;  // y at x = -80
  for (int64_t e = 0; e < n; ++e) {
    const double root = y[e], top = y[e] < kSmall ? root * root : double{saved[e]};
    g[e] = static_cast<float>(g[e] * (top / (2.0 * root + double{kEpsilon})));
  }
}

void topk_bwd(const te_fl_context&, const te_fl_fused_topk_with_score_function_bwd_args& a) {
  const backend::Matrix m = backend::as_matrix(*a.grad_probs);
  const ChoiceReader choice{a, m.cols};
  choice.check();
  if (m.rows == 0) return;
  const Loader grads(*a.grad_probs), intermediate(*a.intermediate_output);
  const std::vector<uint8_t> all(static_cast<size_t>(m.cols), 1);
  for_each_row(m.rows, m.cols, [&](int64_t begin, int64_t end) {
    Row g = row_for(m.cols), saved = g, scratch = g;
    std::vector<uint8_t> chosen(static_cast<size_t>(m.cols));
    for (int64_t t = begin; t < end; ++t) {
      choice.read(t, chosen.data());
      grads(t * m.cols, m.cols, g.data());
      intermediate(t * m.cols, m.cols, saved.data());
      for (int64_t e = 0; e < m.cols; ++e) g[e] = chosen[e] != 0 ? g[e] * a.scaling_factor : 0.0f;
      gradient_row(g, saved, a.use_pre_softmax != 0 ? all.data() : chosen.data(), a.score_function,
                   a.topk > 1, m.cols, scratch);
      for (int64_t e = 0; e < m.cols && a.use_pre_softmax == 0; ++e) {
        if (chosen[e] == 0) g[e] = 0.0f;  // overrides the NaN of 0 times infinity
      }
      store_row(*a.grad_logits, t, m.cols, g);
    }
  });
}
Refusal refuse_topk_bwd(const te_fl_fused_topk_with_score_function_bwd_args& a) {
  if (!all_dense(a.routing_map, a.routing_bits, a.topk_indices, a.intermediate_output) ||
      !all_dense(a.grad_probs, a.grad_logits)) {
    return kNotContiguous;
  }
  return overlaps_askew(*a.grad_logits, *a.grad_probs) ? kOverlaps : nullptr;
}

void score_fwd(const te_fl_context&, const te_fl_fused_score_for_moe_aux_loss_fwd_args& a) {
  const backend::Matrix m = backend::as_matrix(*a.logits);
  const Loader logits(*a.logits);
  const ChoiceWriter writer(a.routing_map, a.routing_bits, nullptr, m.cols);
  const bool saves_logits = a.score_function == TE_FL_SCORE_FUNCTION_SQRTSOFTPLUS;
  for_each_row(m.rows, m.cols, [&](int64_t begin, int64_t end) {
    Chooser chooser(m.cols, a.topk, 0, 0);
    Row x = row_for(m.cols), s = x;
    for (int64_t t = begin; t < end; ++t) {
      logits(t * m.cols, m.cols, x.data());
      scores_row(x.data(), m.cols, a.score_function, s.data());
      store_row(*a.intermediate_output, t, m.cols, saves_logits ? x : s);
      if (a.score_function != TE_FL_SCORE_FUNCTION_SOFTMAX) {
        double sum = double{kEpsilon};
        for (int64_t e = 0; e < m.cols; ++e) sum += s[e];
        for (int64_t e = 0; e < m.cols; ++e) s[e] = static_cast<float>(s[e] / sum);
      }
      store_row(*a.scores, t, m.cols, s);
      writer.put(t, chooser.choose(s.data()));
    }
  });
}
Refusal refuse_score_fwd(const te_fl_fused_score_for_moe_aux_loss_fwd_args& a) {
  return all_dense(a.logits, a.scores, a.routing_map, a.routing_bits, a.intermediate_output)
             ? nullptr
             : kNotContiguous;
}

void score_bwd(const te_fl_context&, const te_fl_fused_score_for_moe_aux_loss_bwd_args& a) {
  const backend::Matrix m = backend::as_matrix(*a.grad_scores);
  if (m.rows == 0) return;
  const Loader grads(*a.grad_scores), intermediate(*a.intermediate_output);
  const std::vector<uint8_t> all(static_cast<size_t>(m.cols), 1);
  for_each_row(m.rows, m.cols, [&](int64_t begin, int64_t end) {
    Row g = row_for(m.cols), saved = g, scratch = g;
    for (int64_t t = begin; t < end; ++t) {
      grads(t * m.cols, m.cols, g.data());
      intermediate(t * m.cols, m.cols, saved.data());
      gradient_row(g, saved, all.data(), a.score_function, true, m.cols, scratch);
      store_row(*a.grad_logits, t, m.cols, g);
    }
  });
}
Refusal refuse_score_bwd(const te_fl_fused_score_for_moe_aux_loss_bwd_args& a) {
  return all_dense(a.intermediate_output, a.grad_scores, a.grad_logits) ? nullptr : kNotContiguous;
}

// ---- auxiliary loss

Row as_row(const te_fl_tensor& t) {
  const int64_t experts = backend::numel(t);
  Row tokens = row_for(experts);
  const int dtype = dtype_of(t);
  if (dtype == TE_FL_I32 || dtype == TE_FL_I64) {
    const Integers values(t);
    for (int64_t e = 0; e < experts; ++e) tokens[e] = static_cast<float>(values[e]);
  } else {
    Loader{t}(0, experts, tokens.data());
  }
  return tokens;
}

void aux_loss_fwd(const te_fl_context&, const te_fl_fused_moe_aux_loss_fwd_args& a) {
  const backend::Matrix m = backend::as_matrix(*a.probs);
  const auto total = static_cast<double>(a.total_num_tokens_tensor != nullptr
                                             ? Integers(*a.total_num_tokens_tensor)[0]
                                             : a.total_num_tokens);
  const auto c = static_cast<float>(double{a.coeff} * a.num_experts / a.topk / total / total);
  const Row tokens = as_row(*a.tokens_per_expert);
  const Loader probs(*a.probs);
  const Parts parts(m.rows, grain_of_rows(m.cols));
  std::vector<double> sums(static_cast<size_t>(parts.count()), 0.0);
  parts.run([&](int64_t part, int64_t begin, int64_t end) {
    Row p = row_for(m.cols);
    double sum = 0.0;
    for (int64_t t = begin; t < end; ++t) {
      probs(t * m.cols, m.cols, p.data());
      sum += dot_f32(p.data(), tokens.data(), m.cols);
    }
    sums[static_cast<size_t>(part)] = sum;
  });
  double sum = 0.0;
  for (const double s : sums) sum += s;
  *backend::data<float>(*a.const_buf) = c;
  const auto loss = static_cast<float>(double{c} * sum);
  store_f32(dtype_of(*a.aux_loss), &loss, 1, backend::data<void>(*a.aux_loss));
}
Refusal refuse_aux_loss_fwd(const te_fl_fused_moe_aux_loss_fwd_args& a) {
  return all_dense(a.probs, a.tokens_per_expert) ? nullptr : kNotContiguous;
}

void aux_loss_bwd(const te_fl_context&, const te_fl_fused_moe_aux_loss_bwd_args& a) {
  const backend::Matrix m = backend::as_matrix(*a.grad_probs);
  Row row = as_row(*a.tokens_per_expert);
  float grad[kPad];
  Loader{*a.grad_aux_loss}(0, 1, grad);
  scale_f32(row.data(), m.cols, *backend::data<const float>(*a.const_buf) * grad[0]);
  for_each_row(m.rows, m.cols, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) store_row(*a.grad_probs, t, m.cols, row);
  });
}
Refusal refuse_aux_loss_bwd(const te_fl_fused_moe_aux_loss_bwd_args& a) {
  return all_dense(a.tokens_per_expert, a.grad_probs) ? nullptr : kNotContiguous;
}

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
  ops.push_back(
      descriptor<TopkBwd, topk_bwd, refuse_topk_bwd>("fused_topk_with_score_function_bwd"));
  ops.push_back(
      descriptor<ScoreFwd, score_fwd, refuse_score_fwd>("fused_score_for_moe_aux_loss_fwd"));
  ops.push_back(
      descriptor<ScoreBwd, score_bwd, refuse_score_bwd>("fused_score_for_moe_aux_loss_bwd"));
  ops.push_back(descriptor<LossFwd, aux_loss_fwd, refuse_aux_loss_fwd>("fused_moe_aux_loss_fwd"));
  ops.push_back(descriptor<LossBwd, aux_loss_bwd, refuse_aux_loss_bwd>("fused_moe_aux_loss_bwd"));
}

}  // namespace te_fl::cpu
