#include "attention.hpp"

#include <algorithm>
#include <cmath>

#include "families.hpp"
#include "te_fl/numeric.hpp"

namespace te_fl::reference {

using backend::AttentionProblem;
using backend::HeadsView;
using backend::SequenceSpan;

namespace {

// Returns a view with the same extents and the strides of a contiguous tensor.
HeadsView compact(HeadsView v, int32_t layout) {
  v.stride_dim = 1;
  v.stride_head = v.dim;
  const int64_t position = v.heads * v.dim;
  v.stride_seq = layout == TE_FL_LAYOUT_SBHD ? v.batch * position : position;
  v.stride_batch = layout == TE_FL_LAYOUT_SBHD   ? position
                   : layout == TE_FL_LAYOUT_BSHD ? v.seqlen * position
                                                 : 0;
  return v;
}

void get_fused_attn_backend(const te_fl_context&, const te_fl_get_fused_attn_backend_args& a) {
  const AttentionProblem p = backend::attention_problem(a);
  // An arbitrary mask is not supported in layout thd, which has no common [Sq, Sk] matrix.
  const bool possible = !(p.thd && p.mask.arbitrary);
  *backend::data<int32_t>(*a.backend) = !possible ? -1 : p.fp8 ? 2 : 1;
}

}  // namespace

Heads::Heads(const te_fl_tensor& t, const char* name, int32_t layout)
    : view_(compact(backend::heads_view(name, t, layout), layout)),
      values_(Reader(t).all_double()) {}

Heads::Heads(const te_fl_tensor& t, int32_t layout)
    : view_(compact(backend::heads_view("output", t, layout), layout)),
      values_(static_cast<size_t>(backend::numel(t)), 0.0) {}

void Heads::store(const te_fl_tensor& out) const {
  const std::vector<float> rounded(values_.begin(), values_.end());
  store_output(out, rounded.data());
}

Fp8Rounding::Fp8Rounding(const te_fl_tensor* quant, double largest) : tensor_(quant) {
  if (quant == nullptr) return;
  e4m3_ = dtype_of(*quant) == TE_FL_F8E4M3;
  given_ = scale_ = *quant->quant->scale;
  if (largest > 0) {
    scale_ = std::min(
        scale_, static_cast<float>((e4m3_ ? numeric::kE4m3Max : numeric::kE5m2Max) / largest));
  }
}

double Fp8Rounding::operator()(double x, double share) {
  if (tensor_ == nullptr) return x;
  const auto value = static_cast<float>(x);
  amax_ = numeric::amax_accumulate(amax_, static_cast<float>(x * share));
  const float code = e4m3_ ? numeric::e4m3_to_float(numeric::float_to_e4m3(value * scale_))
                           : numeric::e5m2_to_float(numeric::float_to_e5m2(value * scale_));
  return double{code} / scale_;
}

void Fp8Rounding::write_back() const {
  if (tensor_ == nullptr) return;
  const te_fl_quant& quant = *tensor_->quant;
  if (quant.scale_inv != nullptr) *static_cast<float*>(quant.scale_inv) = 1.0f / given_;
  if (quant.amax != nullptr) *quant.amax = numeric::amax_accumulate(*quant.amax, amax_);
}

ScoreRow::ScoreRow(const AttentionProblem& problem, const Heads& q, const Heads& k)
    : p_(problem), q_(q), k_(k) {}

double ScoreRow::alibi_slope(int64_t b, int64_t h) const {
  const te_fl_tensor& t = *p_.alibi_slopes;
  const int64_t offset = t.dl.ndim == 2 ? b * backend::stride(t, 0) + h * backend::stride(t, 1)
                                        : h * backend::stride(t, 0);
  return backend::data<const float>(t)[offset];
}

void ScoreRow::compute(const SequenceSpan& span, int64_t b, int64_t h, int64_t i) {
  const auto keys = static_cast<size_t>(span.kv_len);
  keys_ = p_.mask.keys(i, span.q_len, span.kv_len);
  scores_.assign(keys, -INFINITY);
  slopes_.assign(keys, 1);
  masked_.assign(keys, 1);
  if (keys_.empty()) return;
  if (p_.bias != nullptr) {
    const int64_t* shape = p_.bias->dl.shape;
    const int64_t head = (shape[0] == 1 ? 0 : b) * shape[1] + (shape[1] == 1 ? 0 : h);
    bias_.resize(static_cast<size_t>(shape[3]));
    Reader(*p_.bias).read((head * shape[2] + i) * shape[3], shape[3], bias_.data());
  }
  const double* q = q_.row(b, span.q_begin + i, h);
  const double alibi = p_.alibi_slopes != nullptr ? alibi_slope(b, h) : 0.0;
  for (int64_t j = keys_.begin; j < keys_.end; ++j) {
    const auto at = static_cast<size_t>(j);
    if (backend::masked(p_, span, b, h, i, j)) continue;
    const double* k = k_.row(b, span.kv_begin + j, p_.kv_head(h));
    double dot = 0;
    for (int64_t d = 0; d < p_.head_dim; ++d) dot += q[d] * k[d];
    double score = p_.scale * dot;
    if (p_.softcap > 0) {
      const double part = std::tanh(score / p_.softcap);
      score = p_.softcap * part;
      slopes_[at] = 1 - part * part;
    }
    if (p_.bias != nullptr) score += bias_[at];
    if (p_.alibi_slopes != nullptr) {
      score += alibi * static_cast<double>(backend::alibi_distance(i, j, span.q_len, span.kv_len));
    }
    scores_[at] = score;
    masked_[at] = 0;
  }
}

double sink_logit(const AttentionProblem& p, int64_t h) {
  switch (p.softmax_type) {
    case TE_FL_SOFTMAX_TYPE_OFF_BY_ONE:
      return 0.0;
    case TE_FL_SOFTMAX_TYPE_LEARNABLE:
      return backend::data<const float>(*p.softmax_sink)[h * backend::stride(*p.softmax_sink, 0)];
    default:
      return -INFINITY;
  }
}

void append_attention(std::vector<te_fl_op_desc>& ops) {
  ops.push_back(descriptor<te_fl_fused_attn_fwd_args, fused_attn_fwd>("fused_attn_fwd"));
  ops.back().later_args = "softcap";
  ops.push_back(descriptor<te_fl_fused_attn_bwd_args, fused_attn_bwd>("fused_attn_bwd"));
  ops.back().later_args = "softcap";
  ops.push_back(descriptor<te_fl_get_fused_attn_backend_args, get_fused_attn_backend>(
      "get_fused_attn_backend"));
}

}  // namespace te_fl::reference
