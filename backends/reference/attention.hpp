// Shared by the reference's attention forward and backward: operands in double, one row of scores,
// and the FP8 rounding of P and dS.
#pragma once

#include <cstdint>
#include <vector>

#include "element.hpp"
#include "random.hpp"
#include "te_fl/attention.hpp"

namespace te_fl::reference {

// A [batch, seqlen, heads, dim] operand or gradient in double, in the tensor's logical order.
class Heads {
 public:
  Heads(const te_fl_tensor& t, const char* name, int32_t layout);  // reads the tensor's values
  Heads(const te_fl_tensor& t, int32_t layout);  // starts with zeros, for accumulation

  // The head's dim elements at position s of sequence b (thd: b is ignored and s is a token).
  double* row(int64_t b, int64_t s, int64_t h) { return values_.data() + view_.offset(b, s, h, 0); }
  const double* row(int64_t b, int64_t s, int64_t h) const {
    return values_.data() + view_.offset(b, s, h, 0);
  }
  int64_t dim() const { return view_.dim; }
  void store(const te_fl_tensor& out) const;

 private:
  backend::HeadsView view_;
  std::vector<double> values_;
};

// Rounds elements of P or dS to FP8 and back with a supplied scale, and tracks the amax. If `quant`
// is NULL, values are not changed.
class Fp8Rounding {
 public:
  // `largest`: an upper bound of the values' magnitude, or 0 if unknown. The scale is limited so
  // that `largest` times the scale does not exceed FP8's largest number.
  explicit Fp8Rounding(const te_fl_tensor* quant, double largest = 0);
  // Rounds x. The amax is updated with `share` times x.
  double operator()(double x, double share = 1);
  void write_back() const;  // scale_inv, and amax as a running maximum

 private:
  const te_fl_tensor* tensor_;
  bool e4m3_ = false;
  float given_ = 1;  // the scale that the call supplies
  float scale_ = 1;
  float amax_ = 0;
};

// The scores of one row of a (sequence, head).
class ScoreRow {
 public:
  ScoreRow(const backend::AttentionProblem& problem, const Heads& q, const Heads& k);

  // Computes the scores of query i, which visible() and at() then return. Hidden keys have score
  // -inf.
  void compute(const backend::SequenceSpan& span, int64_t b, int64_t h, int64_t i);
  backend::KeyRange visible() const { return keys_; }
  double at(int64_t j) const { return scores_[static_cast<size_t>(j)]; }
  bool masked(int64_t j) const { return masked_[static_cast<size_t>(j)] != 0; }
  // Returns the derivative of the score with respect to scale * (q k^T) of key j; 1 without
  // softcap.
  double slope(int64_t j) const { return slopes_[static_cast<size_t>(j)]; }

 private:
  double alibi_slope(int64_t b, int64_t h) const;

  const backend::AttentionProblem& p_;
  const Heads& q_;
  const Heads& k_;
  std::vector<double> bias_;  // the bias of one row
  std::vector<double> scores_;
  std::vector<double> slopes_;
  std::vector<uint8_t> masked_;
  backend::KeyRange keys_;
};

// The sink logit of head h; -inf for a vanilla softmax.
double sink_logit(const backend::AttentionProblem& p, int64_t h);

// Index of row (b, h, i) in a compact softmax_lse.
inline int64_t lse_index(const backend::AttentionProblem& p, const backend::SequenceSpan& span,
                         int64_t b, int64_t h, int64_t i) {
  return p.thd ? (span.q_begin + i) * p.heads + h : (b * p.heads + h) * p.seqlen_q + i;
}

// Attention dropout. factor() returns 0 for a dropped probability, else 1 / (1 - p).
class AttentionDropout {
 public:
  AttentionDropout(const te_fl_context& ctx, const backend::AttentionProblem& p,
                   backend::LogicalExtents extents)
      : stream_(*ctx.rng, p.dropout_p),
        heads_(p.heads),
        extents_(extents),
        kept_(1.0 / (1.0 - p.dropout_p)) {}
  double factor(int64_t b, int64_t h, int64_t i, int64_t j) {
    const int64_t row = (b * heads_ + h) * extents_.q + i;
    return stream_.keep(static_cast<uint64_t>(row * extents_.kv + j)) ? kept_ : 0.0;
  }
  double largest_factor() const { return kept_; }

 private:
  DropoutStream stream_;
  int64_t heads_;
  backend::LogicalExtents extents_;
  double kept_;
};

void fused_attn_fwd(const te_fl_context& ctx, const te_fl_fused_attn_fwd_args& a);
void fused_attn_bwd(const te_fl_context& ctx, const te_fl_fused_attn_bwd_args& a);

}  // namespace te_fl::reference
