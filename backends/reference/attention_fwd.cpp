#include <cmath>
#include <vector>

#include "attention.hpp"
#include "row_max.hpp"

namespace te_fl::reference {

using backend::AttentionProblem;
using backend::KeyRange;
using backend::SequenceSpan;

namespace {

class Forward {
 public:
  Forward(const te_fl_context& ctx, const te_fl_fused_attn_fwd_args& a)
      : a_(a),
        p_(backend::attention_problem(a)),
        spans_(backend::host_sequences(p_)),
        q_(*a.q, "q", a.layout),
        k_(*a.k, "k", a.layout),
        v_(*a.v, "v", a.layout),
        o_(*a.o, a.layout),
        lse_(static_cast<size_t>(p_.q.batch * p_.q.seqlen * p_.heads), -INFINITY),
        scores_(p_, q_, k_),
        dropout_(ctx, p_, backend::logical_extents(p_, spans_)),
        round_p_(a.s_quant, dropout_.largest_factor()) {}

  void run() {
    for (int64_t b = 0; b < p_.batch; ++b) {
      const SequenceSpan& span = spans_[static_cast<size_t>(b)];
      for (int64_t h = 0; h < p_.heads; ++h) {
        for (int64_t i = 0; i < span.q_len; ++i) row(span, b, h, i);
      }
    }
    o_.store(*a_.o);
    if (a_.softmax_lse != nullptr) store_output(*a_.softmax_lse, lse_.data());
    round_p_.write_back();
    if (a_.saved != nullptr) a_.saved->opaque = 0;
  }

 private:
  void row(const SequenceSpan& span, int64_t b, int64_t h, int64_t i) {
    scores_.compute(span, b, h, i);
    const KeyRange keys = scores_.visible();
    double largest = -INFINITY;
    for (int64_t j = keys.begin; j < keys.end; ++j) largest = max_or_nan(largest, scores_.at(j));
    if (largest == -INFINITY) return;  // no key: keeps the initial zeros and -inf
    const double sink = sink_logit(p_, h);
    const double top = max_or_nan(largest, sink);
    double sum = std::exp(sink - top);
    for (int64_t j = keys.begin; j < keys.end; ++j) sum += std::exp(scores_.at(j) - top);
    lse_[static_cast<size_t>(lse_index(p_, span, b, h, i))] =
        static_cast<float>(top + std::log(sum));
    double* o = o_.row(b, span.q_begin + i, h);
    const double share = std::exp(largest - top) / sum;
    for (int64_t j = keys.begin; j < keys.end; ++j) {
      if (scores_.masked(j)) continue;
      // FP8 rounds exp(score - largest score), whose precision does not depend on the number of
      // keys.
      const double e =
          round_p_(std::exp(scores_.at(j) - largest) * dropout_.factor(b, h, i, j), share);
      const double* v = v_.row(b, span.kv_begin + j, p_.kv_head(h));
      for (int64_t d = 0; d < p_.head_dim_v; ++d) o[d] += e * share * v[d];
    }
  }

  const te_fl_fused_attn_fwd_args& a_;
  AttentionProblem p_;
  std::vector<SequenceSpan> spans_;
  Heads q_, k_, v_, o_;
  std::vector<float> lse_;
  ScoreRow scores_;
  AttentionDropout dropout_;
  Fp8Rounding round_p_;
};

}  // namespace

void fused_attn_fwd(const te_fl_context& ctx, const te_fl_fused_attn_fwd_args& a) {
  Forward(ctx, a).run();
}

}  // namespace te_fl::reference
