#include <cmath>
#include <string>
#include <vector>

#include "attention.hpp"

namespace te_fl::reference {

using backend::AttentionProblem;
using backend::KeyRange;
using backend::SequenceSpan;

namespace {

void refuse_foreign_record(const te_fl_fused_attn_bwd_args& a) {
  if (a.saved != nullptr && a.saved->opaque != 0) {
    backend::unsupported(std::string("saved is an opaque record of ") +
                         (a.saved->producer != nullptr ? a.saved->producer : "another") +
                         ", which only that implementation can read");
  }
}

class Backward {
 public:
  Backward(const te_fl_context& ctx, const te_fl_fused_attn_bwd_args& a)
      : a_(a),
        p_(backend::attention_problem(a)),
        spans_(backend::host_sequences(p_)),
        q_(*a.q, "q", a.layout),
        k_(*a.k, "k", a.layout),
        v_(*a.v, "v", a.layout),
        o_(*a.o, "o", a.layout),
        d_o_(*a.d_o, "d_o", a.layout),
        lse_(Reader(*a.softmax_lse).all_double()),
        dq_(*a.dq, a.layout),
        dk_(*a.dk, a.layout),
        dv_(*a.dv, a.layout),
        dbias_(a.dbias != nullptr ? static_cast<size_t>(backend::numel(*a.dbias)) : 0, 0.0),
        dsink_(p_.batch > 0 || a.dsink != nullptr ? static_cast<size_t>(p_.heads) : 0, 0.0),
        scores_(p_, q_, k_),
        dropout_(ctx, p_, backend::logical_extents(p_, spans_)),
        round_p_(a.s_quant),
        round_ds_(a.dp_quant) {
    refuse_foreign_record(a);
  }

  void run() {
    for (int64_t b = 0; b < p_.batch; ++b) {
      const SequenceSpan& span = spans_[static_cast<size_t>(b)];
      for (int64_t h = 0; h < p_.heads; ++h) {
        for (int64_t i = 0; i < span.q_len; ++i) row(span, b, h, i);
      }
    }
    dq_.store(*a_.dq);
    dk_.store(*a_.dk);
    dv_.store(*a_.dv);
    if (a_.dbias != nullptr) store(*a_.dbias, dbias_);
    if (a_.dsink != nullptr) store(*a_.dsink, dsink_);
    round_ds_.write_back();
  }

 private:
  static void store(const te_fl_tensor& out, const std::vector<double>& values) {
    const std::vector<float> rounded(values.begin(), values.end());
    store_output(out, rounded.data());
  }

  void row(const SequenceSpan& span, int64_t b, int64_t h, int64_t i) {
    const double lse = lse_[static_cast<size_t>(lse_index(p_, span, b, h, i))];
    if (lse == -INFINITY) return;  // the row sees no key
    scores_.compute(span, b, h, i);
    const double* d_o = d_o_.row(b, span.q_begin + i, h);
    const double* o = o_.row(b, span.q_begin + i, h);
    double delta = 0;
    for (int64_t d = 0; d < p_.head_dim_v; ++d) delta += d_o[d] * o[d];
    const KeyRange keys = scores_.visible();
    for (int64_t j = keys.begin; j < keys.end; ++j) {
      if (!scores_.masked(j)) element(span, b, h, i, j, std::exp(scores_.at(j) - lse), delta);
    }
    dsink_[static_cast<size_t>(h)] -= std::exp(sink_logit(p_, h) - lse) * delta;
  }

  // Adds the contributions of the pair (i, j), with probability p, to every gradient.
  void element(const SequenceSpan& span, int64_t b, int64_t h, int64_t i, int64_t j, double p,
               double delta) {
    const int64_t q_at = span.q_begin + i;
    const int64_t kv_at = span.kv_begin + j;
    const int64_t kv_head = p_.kv_head(h);
    const double factor = dropout_.factor(b, h, i, j);
    const double* d_o = d_o_.row(b, q_at, h);
    const double* v = v_.row(b, kv_at, kv_head);
    double* dv = dv_.row(b, kv_at, kv_head);
    const double p_dropped = round_p_(p * factor);
    double dp = 0;
    for (int64_t d = 0; d < p_.head_dim_v; ++d) {
      dp += d_o[d] * v[d];
      dv[d] += p_dropped * d_o[d];
    }
    const double ds = p * (factor * dp - delta);
    if (a_.dbias != nullptr) dbias_[bias_index(b, h, i, j)] += ds;
    const double ds_scaled = p_.scale * round_ds_(ds * scores_.slope(j));
    const double* q = q_.row(b, q_at, h);
    const double* k = k_.row(b, kv_at, kv_head);
    double* dq = dq_.row(b, q_at, h);
    double* dk = dk_.row(b, kv_at, kv_head);
    for (int64_t d = 0; d < p_.head_dim; ++d) {
      dq[d] += ds_scaled * k[d];
      dk[d] += ds_scaled * q[d];
    }
  }

  // Returns the row-major index in dbias of a pair. A dimension of dbias with extent 1 is summed
  // over.
  size_t bias_index(int64_t b, int64_t h, int64_t i, int64_t j) const {
    const int64_t* shape = a_.dbias->dl.shape;
    const int64_t head = (shape[0] == 1 ? 0 : b) * shape[1] + (shape[1] == 1 ? 0 : h);
    return static_cast<size_t>((head * shape[2] + i) * shape[3] + j);
  }

  const te_fl_fused_attn_bwd_args& a_;
  AttentionProblem p_;
  std::vector<SequenceSpan> spans_;
  Heads q_, k_, v_, o_, d_o_;
  std::vector<double> lse_;
  Heads dq_, dk_, dv_;
  std::vector<double> dbias_, dsink_;
  ScoreRow scores_;
  AttentionDropout dropout_;
  Fp8Rounding round_p_, round_ds_;
};

}  // namespace

void fused_attn_bwd(const te_fl_context& ctx, const te_fl_fused_attn_bwd_args& a) {
  Backward(ctx, a).run();
}

}  // namespace te_fl::reference
