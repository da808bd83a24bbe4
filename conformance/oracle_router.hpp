#pragma once

// The expert router, computed from its formulas (docs/numerics.md, Experts) in double precision.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "conformance/format.hpp"
#include "te_fl/ops/enums.h"

namespace te_fl::conformance {

using Numbers = std::vector<double>;

struct RouterOptions {
  int function = TE_FL_SCORE_FUNCTION_SOFTMAX;
  bool before = false;  // softmax before the selection
  int64_t topk = 2, groups = 0, group_topk = 0;
  double scaling = 1;
};

inline double logistic(double x) { return 1 / (1 + std::exp(-x)); }
inline double root_softplus(double x) { return std::sqrt(std::log1p(std::exp(x))); }

inline Numbers softmax_values(const Numbers& x) {
  double top = -infinity(), sum = 0;
  for (double v : x) top = std::isnan(v) || v > top ? v : top;
  Numbers y;
  for (double v : x) y.push_back(std::exp(v - top)), sum += y.back();
  for (double& v : y) v /= sum;
  return y;
}

inline Numbers compute_scores(const Numbers& x, int function) {
  if (function == TE_FL_SCORE_FUNCTION_SOFTMAX) return softmax_values(x);
  Numbers y;
  for (double v : x)
    y.push_back(function == TE_FL_SCORE_FUNCTION_SIGMOID ? logistic(v) : root_softplus(v));
  return y;
}

// Selects the best `k` of `among`, one after the other. NaN is above all numbers; of equal scores
// the first wins. Sets `unclear` if FP32 rounding could order two candidates differently than
// double.
class Picker {
 public:
  bool unclear = false;
  std::vector<int64_t> pick(const Numbers& x, std::vector<int64_t> among, int64_t k) {
    std::vector<int64_t> picked;
    for (int64_t i = 0; i < k; ++i) {
      auto best = among.begin();
      for (auto it = among.begin(); it != among.end(); ++it)
        if (above(x[*it], x[*best])) best = it;
      for (int64_t other : among) {
        const double gap = std::fabs(x[other] - x[*best]);
        unclear = unclear || (gap > 0 && gap < 2e-6 * (std::fabs(x[*best]) + 1e-3));
      }
      picked.push_back(*best);
      among.erase(best);
    }
    return picked;
  }

 private:
  static bool above(double a, double b) { return std::isnan(a) ? !std::isnan(b) : a > b; }
};

inline std::vector<int64_t> up_to(int64_t begin, int64_t end) {
  std::vector<int64_t> all;
  for (int64_t i = begin; i < end; ++i) all.push_back(i);
  return all;
}

struct Routed {
  std::vector<int64_t> chosen;
  Numbers probs, saved;
  bool unclear = false;
};

inline Routed route(const Numbers& logits, const Numbers& bias, const RouterOptions& o) {
  const auto experts = static_cast<int64_t>(logits.size());
  const bool after = o.function == TE_FL_SCORE_FUNCTION_SOFTMAX && !o.before;
  const Numbers scores = after ? logits : compute_scores(logits, o.function);
  Numbers judged = scores;
  for (size_t e = 0; e < bias.size(); ++e) judged[e] += bias[e];
  Picker picker;
  std::vector<int64_t> among = up_to(0, experts);
  if (o.groups > 0) {
    const int64_t size = experts / o.groups;
    Numbers group_scores(static_cast<size_t>(o.groups), 0);
    Picker inside;  // near ties inside a group hardly change its sum
    for (int64_t g = 0; g < o.groups; ++g)
      for (int64_t e : inside.pick(judged, up_to(g * size, (g + 1) * size), o.topk / o.group_topk))
        group_scores[g] += judged[e];
    std::vector<int64_t> best = picker.pick(group_scores, up_to(0, o.groups), o.group_topk);
    std::sort(best.begin(), best.end());
    among.clear();
    for (int64_t g : best)
      for (int64_t e = g * size; e < (g + 1) * size; ++e) among.push_back(e);
  }
  Routed r;
  r.chosen = picker.pick(judged, among, o.topk);
  r.unclear = picker.unclear;
  Numbers p;
  for (int64_t e : r.chosen) p.push_back(scores[e]);
  if (after) p = softmax_values(p);
  double sum = 1;
  if (o.function != TE_FL_SCORE_FUNCTION_SOFTMAX && o.topk > 1) {
    sum = 1e-20;
    for (double v : p) sum += v;
  }
  r.probs.assign(logits.size(), 0);
  r.saved = o.function == TE_FL_SCORE_FUNCTION_SQRTSOFTPLUS ? logits : scores;
  if (after) r.saved.assign(logits.size(), -infinity());
  for (size_t i = 0; i < p.size(); ++i) {
    r.probs[r.chosen[i]] = o.scaling * p[i] / sum;
    if (after) r.saved[r.chosen[i]] = p[i];
  }
  return r;
}

// The gradient of a row's logits. With `divides`, the scores were divided by their sum over the
// experts with counts[e] != 0. `size` receives the sum of the magnitudes of its terms.
struct RowGradient {
  Numbers value, size;
};
inline RowGradient score_gradient(const Numbers& g, const Numbers& saved,
                                  const std::vector<uint8_t>& counts, int function, bool divides) {
  RowGradient r{Numbers(g.size(), 0), Numbers(g.size(), 0)};
  Numbers y = saved;
  if (function == TE_FL_SCORE_FUNCTION_SQRTSOFTPLUS)
    for (double& v : y) v = root_softplus(v);
  double sum = 1e-20, dot = 0, size = 0;
  for (size_t e = 0; e < g.size(); ++e) {
    if (counts[e] == 0) continue;
    sum += y[e], dot += g[e] * y[e], size += std::fabs(g[e] * y[e]);
  }
  for (size_t e = 0; e < g.size(); ++e) {
    if (counts[e] == 0 && (divides || function == TE_FL_SCORE_FUNCTION_SOFTMAX)) continue;
    if (function == TE_FL_SCORE_FUNCTION_SOFTMAX) {
      r.value[e] = y[e] * (g[e] - dot), r.size[e] = y[e] * (std::fabs(g[e]) + size);
      continue;
    }
    const double slope = function == TE_FL_SCORE_FUNCTION_SIGMOID
                             ? y[e] * (1 - y[e])
                             : logistic(saved[e]) / (2 * y[e] + 1e-20);
    r.value[e] = divides ? (g[e] / sum - dot / (sum * sum)) * slope : g[e] * slope;
    r.size[e] =
        divides ? (std::fabs(g[e]) / sum + size / (sum * sum)) * slope : std::fabs(g[e]) * slope;
  }
  return r;
}

}  // namespace te_fl::conformance
