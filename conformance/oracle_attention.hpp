#pragma once

#include <algorithm>
#include <vector>

#include "conformance/case.hpp"
#include "conformance/oracle_philox.hpp"

// Scaled dot-product attention in double precision, row by row.
namespace te_fl::conformance {

// An attention problem: sizes, masks and optional terms, with the values of all inputs as they are
// stored.
struct Attention {
  int layout = TE_FL_LAYOUT_BSHD, mask = TE_FL_MASK_TYPE_NONE, softmax = TE_FL_SOFTMAX_TYPE_VANILLA;
  int64_t b = 1, sq = 1, sk = 1, h = 1, g = 1, d = 1, dv = 1;
  double scale = 1;
  double softcap = 0;
  float dropout = 0;
  int64_t left = -1, right = -1;
  std::vector<int64_t> len_q, len_k;      // length of each sequence; empty: sq, sk
  std::vector<int64_t> start_q, start_k;  // thd: first token of each sequence
  int64_t tokens_q = 0, tokens_k = 0;     // thd: total numbers of tokens
  std::vector<double> q, k, v;
  std::vector<double> bias;  // [bias_b, bias_h, sq, sk]
  int64_t bias_b = 1, bias_h = 1;
  std::vector<double> alibi;  // [H] or [B, H]
  std::vector<double> given_mask;
  int64_t mask_b = 1, mask_h = 1;
  std::vector<double> sink;  // [H]; empty: no sinks
  te_fl_rng rng;

  bool thd() const { return layout == TE_FL_LAYOUT_THD; }
  int64_t q_length(int64_t n) const { return len_q.empty() ? sq : len_q[n]; }
  int64_t k_length(int64_t n) const { return len_k.empty() ? sk : len_k[n]; }
  // The index of an element of a [.., tokens, .., heads, width] tensor.
  int64_t at(int64_t n, int64_t s, int64_t head, int64_t heads, int64_t width, bool query) const {
    if (thd()) return (((query ? start_q : start_k)[n] + s) * heads + head) * width;
    const int64_t length = query ? sq : sk;
    return ((layout == TE_FL_LAYOUT_SBHD ? s * b + n : n * length + s) * heads + head) * width;
  }
  int64_t lse_at(int64_t n, int64_t s, int64_t head) const {
    return thd() ? (start_q[n] + s) * h + head : (n * h + head) * sq + s;
  }
  int64_t kv_head(int64_t head) const { return head / (h / g); }
  bool masked(int64_t n, int64_t head, int64_t i, int64_t j) const;
  double score(int64_t n, int64_t head, int64_t i, int64_t j, double* size,
               double* cap_slope = nullptr) const;
  bool kept(int64_t n, int64_t head, int64_t i, int64_t j) const {
    return dropout == 0 || keeps(rng, ((n * h + head) * sq + i) * sk + j, dropout);
  }
};

inline bool Attention::masked(int64_t n, int64_t head, int64_t i, int64_t j) const {
  if (i >= q_length(n) || j >= k_length(n)) return true;
  const bool top_left = mask == TE_FL_MASK_TYPE_CAUSAL || mask == TE_FL_MASK_TYPE_PADDING_CAUSAL;
  const bool causal = top_left || mask == TE_FL_MASK_TYPE_CAUSAL_BOTTOM_RIGHT ||
                      mask == TE_FL_MASK_TYPE_PADDING_CAUSAL_BOTTOM_RIGHT;
  const int64_t diagonal = i + (top_left ? 0 : k_length(n) - q_length(n));
  if (causal && j > diagonal) return true;
  if (left >= 0 && j < diagonal - left) return true;
  if (right >= 0 && j > diagonal + right) return true;
  if (mask != TE_FL_MASK_TYPE_ARBITRARY) return false;
  const int64_t mb = mask_b == 1 ? 0 : n, mh = mask_h == 1 ? 0 : head;
  return given_mask[((mb * mask_h + mh) * sq + i) * sk + j] != 0;
}

// The score after scaling, cap and bias. `size` receives the sum of magnitudes, `cap_slope` the
// derivative of the cap, 1 / cosh^2.
inline double Attention::score(int64_t n, int64_t head, int64_t i, int64_t j, double* size,
                               double* cap_slope) const {
  const int64_t qa = at(n, i, head, h, d, true), ka = at(n, j, kv_head(head), g, d, false);
  double sum = 0, magnitude = 0;
  for (int64_t e = 0; e < d; ++e)
    sum += q[qa + e] * k[ka + e], magnitude += std::fabs(q[qa + e] * k[ka + e]);
  sum *= scale, magnitude *= std::fabs(scale);
  if (cap_slope != nullptr) *cap_slope = 1;
  if (softcap > 0) {
    if (cap_slope != nullptr) *cap_slope = std::pow(std::cosh(sum / softcap), -2);
    sum = softcap * std::tanh(sum / softcap), magnitude += std::fabs(sum);
  }
  auto plus = [&](double x) { sum += x, magnitude += std::fabs(x); };
  if (!bias.empty())
    plus(bias[(((bias_b == 1 ? 0 : n) * bias_h + (bias_h == 1 ? 0 : head)) * sq + i) * sk + j]);
  if (!alibi.empty()) {
    const double slope = alibi[static_cast<int64_t>(alibi.size()) == h ? head : n * h + head];
    plus(slope * static_cast<double>(j - i - (k_length(n) - q_length(n))));
  }
  *size = magnitude;
  return sum;
}

// One row of attention probabilities, with its log-sum-exp.
struct AttentionRow {
  std::vector<double> p;  // before dropout; 0 if masked
  double lse = -infinity();
  double size = 0;  // largest sum of magnitudes of a score
};

inline AttentionRow attention_row(const Attention& a, int64_t n, int64_t head, int64_t i) {
  AttentionRow row;
  row.p.assign(static_cast<size_t>(a.k_length(n)), 0);
  std::vector<double> s(row.p.size(), -infinity());
  double top = -infinity(), sum = 0;
  for (int64_t j = 0; j < a.k_length(n); ++j) {
    if (a.masked(n, head, i, j)) continue;
    double size;
    s[j] = a.score(n, head, i, j, &size);
    row.size = std::max(row.size, size), top = std::max(top, s[j]);
  }
  if (top == -infinity()) return row;
  if (a.softmax != TE_FL_SOFTMAX_TYPE_VANILLA) {
    const double logit = a.softmax == TE_FL_SOFTMAX_TYPE_LEARNABLE ? a.sink[head] : 0;
    sum = std::exp(logit - top);
  }
  for (size_t j = 0; j < s.size(); ++j) sum += row.p[j] = std::exp(s[j] - top);
  for (double& p : row.p) p /= sum;
  row.lse = top + std::log(sum);
  return row;
}

}  // namespace te_fl::conformance
