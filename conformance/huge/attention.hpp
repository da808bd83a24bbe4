// Attention on huge tensors, forward and backward. Runs on the implementation that dispatch
// chooses, and on the plain kernels of a backend that otherwise calls a library. Log-sum-exps and
// outputs that the backward reads are arbitrary numbers, since its formula does not depend on their
// origin.
#pragma once

#include <algorithm>

#include "conformance/huge/cases.hpp"
#include "conformance/huge/quantised.hpp"
#include "conformance/oracle_philox.hpp"

namespace te_fl::huge::attention_calls {

using conformance::keeps;

struct Problem {
  int layout = TE_FL_LAYOUT_BSHD, mask = TE_FL_MASK_TYPE_NONE;
  int64_t heads = 16, groups = 16, dim = 128, length = 128;  // length: of a sequence
  bool bias = false, plain = false;
  float dropout = 0;

  bool thd() const { return layout == TE_FL_LAYOUT_THD; }
};
constexpr int64_t kShift = 24;  // difference of alternating sequence lengths, with thd and padding
constexpr te_fl_rng kRandom{.seed = 17, .offset = 1000};

// `plain`: require the implementation under test, not another one of the same plugin.
inline void call_attention(Run& run, const char* op, const void* args, bool plain) {
  PolicySettings settings;
  if (plain && !run.impl().empty()) {
    settings.per_op[op] = {{PolicyToken::Type::kImpl, Kind::kDefault, run.impl()}};
  }
  const PolicyScope scope(std::move(settings));
  run.call(op, args, kRandom);
}

class Attention {
 public:
  Attention(Run& run, const Problem& p) : p_(p), scale_(1 / std::sqrt(static_cast<float>(p.dim))) {
    // The huge tensor is the bias if there is one, otherwise q.
    const int64_t each = p.heads * p.length * (p.bias ? p.length : p.dim);
    batch_ = run.rows(each, 2);
    Shape q = shape(p.heads), k = shape(p.groups);
    q_ = run.input(q, q_values_), k_ = run.input(k, k_values_), v_ = run.input(k, v_values_);
    if (p.bias) {
      bias_ = run.input({batch_, p.heads, p.length, p.length}, bias_values_);
    }
    std::vector<int32_t> ends = {0};
    for (int64_t b = 0; b < batch_; ++b) ends.push_back(ends.back() + static_cast<int32_t>(own(b)));
    if (p.thd() || p.mask == TE_FL_MASK_TYPE_PADDING) lengths_ = run.integers(ends);
  }

  void forward(Run& run) {
    const Tensor o = run.output(shape(p_.heads)), lse = run.output(lse_shape(), DType::kF32);
    te_fl_fused_attn_fwd_args args{};
    fill(args);
    args.o = o, args.softmax_lse = lse;
    call(run, "fused_attn_fwd", &args);
    std::vector<double> s;
    Place row{-1, -1, -1};
    double sum = 0;
    const auto at_row = [&](const Place& at) {
      if (at == row) return;
      row = at, sum = 0;
      s = scores(at);
      for (double& x : s) sum += x = std::exp(x);
    };
    run.expect_near(o, "o", [&](int64_t i) {
      const Place at = place(i, p_.heads);
      at_row(at);
      Near v{0, 0};
      for (int64_t j = 0; sum > 0 && j < static_cast<int64_t>(s.size()); ++j) {
        const double term = s[static_cast<size_t>(j)] / sum * kept(at, j) *
                            v_values_.at(index(at.b, j, at.h / ratio(), p_.groups) + i % p_.dim);
        v.value += term, v.tolerance += 0x1p-8 * std::fabs(term);
      }
      v.tolerance += 0x1p-8 * std::fabs(v.value);
      return v;
    });
    run.expect_near(
        lse, "softmax_lse",
        [&](int64_t i) {
          at_row(lse_place(i));
          return Near{std::log(sum), 1e-3 * (1 + std::fabs(std::log(sum)))};
        },
        Run::kFew);
  }

  void backward(Run& run) {
    const Tensor o = run.input(shape(p_.heads), o_values_),
                 d_o = run.input(shape(p_.heads), do_values_),
                 lse = run.input(lse_shape(), lse_values_, DType::kF32);
    const Tensor dq = run.output(shape(p_.heads)), dk = run.output(shape(p_.groups)),
                 dv = run.output(shape(p_.groups));
    const Tensor dbias = p_.bias ? run.output({batch_, p_.heads, p_.length, p_.length}) : Tensor();
    te_fl_fused_attn_bwd_args args{};
    fill(args);
    args.o = o, args.d_o = d_o, args.softmax_lse = lse;
    args.dq = dq, args.dk = dk, args.dv = dv, args.dbias = dbias;
    call(run, "fused_attn_bwd", &args);
    expect_dq(run, dq);
    expect_dk(run, dk, true);
    expect_dk(run, dv, false);
    if (!p_.bias) return;
    run.expect_near(dbias, "dbias", [&](int64_t i) {
      const int64_t j = i % p_.length, row = i / p_.length;
      const Place at{row / p_.length / p_.heads, row % p_.length, row / p_.length % p_.heads};
      return slope(at, j);
    });
  }

 private:
  struct Place {  // sequence, token, head
    int64_t b, s, h;
    bool operator==(const Place&) const = default;
  };

  int64_t ratio() const { return p_.heads / p_.groups; }
  bool alternates() const { return p_.thd() || p_.mask == TE_FL_MASK_TYPE_PADDING; }
  // The length of a sequence. For thd, two consecutive sequences fill twice the nominal length.
  int64_t own(int64_t b) const {
    if (!alternates()) return p_.length;
    return b % 2 == 0 ? p_.length - kShift : p_.length + (p_.thd() ? kShift : 0);
  }
  Shape shape(int64_t heads) const {
    if (p_.thd()) return {batch_ * p_.length, heads, p_.dim};
    return p_.layout == TE_FL_LAYOUT_SBHD ? Shape{p_.length, batch_, heads, p_.dim}
                                          : Shape{batch_, p_.length, heads, p_.dim};
  }
  Shape lse_shape() const {
    if (p_.thd()) return {batch_ * p_.length, p_.heads};
    return {batch_, p_.heads, p_.length};
  }
  // The index of the token's first element in a tensor with `heads` heads.
  int64_t index(int64_t b, int64_t s, int64_t h, int64_t heads) const {
    int64_t token = b * p_.length + s;
    if (p_.layout == TE_FL_LAYOUT_SBHD) token = s * batch_ + b;
    if (p_.thd() && b % 2 != 0) token -= kShift;
    return (token * heads + h) * p_.dim;
  }
  Place token_place(int64_t token) const {
    if (p_.layout == TE_FL_LAYOUT_SBHD) return {token % batch_, token / batch_, 0};
    if (!p_.thd()) return {token / p_.length, token % p_.length, 0};
    const int64_t pair = token / (2 * p_.length), rest = token % (2 * p_.length);
    const int64_t first = p_.length - kShift;
    return rest < first ? Place{2 * pair, rest, 0} : Place{2 * pair + 1, rest - first, 0};
  }
  Place place(int64_t i, int64_t heads) const {
    Place at = token_place(i / p_.dim / heads);
    at.h = i / p_.dim % heads;
    return at;
  }
  Place lse_place(int64_t i) const {
    if (!p_.thd()) return {i / p_.length / p_.heads, i % p_.length, i / p_.length % p_.heads};
    Place at = token_place(i / p_.heads);
    at.h = i % p_.heads;
    return at;
  }
  int64_t lse_index(const Place& at) const {
    if (p_.thd()) return index(at.b, at.s, at.h, p_.heads) / p_.dim;
    return (at.b * p_.heads + at.h) * p_.length + at.s;
  }
  bool sees(const Place& at, int64_t j) const {
    if (at.s >= own(at.b) || j >= own(at.b)) return false;
    const bool causal = p_.mask == TE_FL_MASK_TYPE_CAUSAL;
    return !causal || j <= at.s;
  }
  double kept(const Place& at, int64_t j) const {
    if (p_.dropout == 0) return 1;
    const int64_t i = ((at.b * p_.heads + at.h) * p_.length + at.s) * p_.length + j;
    return keeps(kRandom, i, p_.dropout) ? 1 / (1 - double{p_.dropout}) : 0;
  }
  double score(const Place& at, int64_t j) const {
    double sum = dot(q_values_, index(at.b, at.s, at.h, p_.heads), k_values_,
                     index(at.b, j, at.h / ratio(), p_.groups)) *
                 double{scale_};
    if (p_.bias) {
      sum += bias_values_.at(((at.b * p_.heads + at.h) * p_.length + at.s) * p_.length + j);
    }
    return sum;
  }
  std::vector<double> scores(const Place& at) const {
    std::vector<double> s;
    for (int64_t j = 0; j < own(at.b); ++j) s.push_back(sees(at, j) ? score(at, j) : -INFINITY);
    return s;
  }
  double dot(const Pattern& a, int64_t i, const Pattern& b, int64_t j) const {
    double sum = 0;
    for (int64_t e = 0; e < p_.dim; ++e) sum += double{a.at(i + e)} * double{b.at(j + e)};
    return sum;
  }
  // dS before the multiplication with the scale of the scores, and its error tolerance.
  Near slope(const Place& at, int64_t j) const {
    if (!sees(at, j)) return {0, 0};
    const int64_t row = index(at.b, at.s, at.h, p_.heads);
    const double p = std::exp(score(at, j) - lse_values_.at(lse_index(at)));
    const double dp =
        dot(do_values_, row, v_values_, index(at.b, j, at.h / ratio(), p_.groups)) * kept(at, j);
    const double delta = dot(do_values_, row, o_values_, row), ds = p * (dp - delta);
    return {ds, 0x1p-7 * (p * (std::fabs(dp) + std::fabs(delta) + 1))};
  }
  void expect_dq(Run& run, const Tensor& dq) const {
    Place row{-1, -1, -1};
    std::vector<Near> ds;
    run.expect_near(dq, "dq", [&](int64_t i) {
      const Place at = place(i, p_.heads);
      if (!(at == row)) {
        row = at;
        ds.clear();
        for (int64_t j = 0; j < own(at.b); ++j) ds.push_back(slope(at, j));
      }
      Near sum{0, 1e-6};
      for (int64_t j = 0; j < static_cast<int64_t>(ds.size()); ++j) {
        const double k =
            scale_ * k_values_.at(index(at.b, j, at.h / ratio(), p_.groups) + i % p_.dim);
        sum.value += ds[static_cast<size_t>(j)].value * k;
        sum.tolerance += ds[static_cast<size_t>(j)].tolerance * std::fabs(k);
      }
      sum.tolerance += 0x1p-8 * std::fabs(sum.value);
      return sum;
    });
  }
  // Expects dk, or with `keys` false dv, the sum of P dO.
  void expect_dk(Run& run, const Tensor& t, bool keys) const {
    Place column{-1, -1, -1};
    std::vector<Near> weights;  // index: head of the group and query
    run.expect_near(t, keys ? "dk" : "dv", [&](int64_t i) {
      const Place at = place(i, p_.groups);
      if (!(at == column)) {
        column = at;
        weights.clear();
        for (int64_t h = at.h * ratio(); h < (at.h + 1) * ratio(); ++h) {
          for (int64_t q = 0; q < own(at.b); ++q) {
            const Place row{at.b, q, h};
            if (keys) {
              weights.push_back(slope(row, at.s));
            } else {
              const double p = sees(row, at.s)
                                   ? std::exp(score(row, at.s) - lse_values_.at(lse_index(row))) *
                                         kept(row, at.s)
                                   : 0;
              weights.push_back({p, 0x1p-7 * p});
            }
          }
        }
      }
      Near sum{0, 1e-6};
      size_t next = 0;
      for (int64_t h = at.h * ratio(); h < (at.h + 1) * ratio(); ++h) {
        for (int64_t q = 0; q < own(at.b); ++q, ++next) {
          const int64_t row = index(at.b, q, h, p_.heads) + i % p_.dim;
          const double x = keys ? scale_ * q_values_.at(row) : do_values_.at(row);
          sum.value += weights[next].value * x,
              sum.tolerance += weights[next].tolerance * std::fabs(x);
        }
      }
      sum.tolerance += 0x1p-8 * std::fabs(sum.value);
      return sum;
    });
  }

  template <class Args>
  void fill(Args& args) const {
    args.q = q_, args.k = k_, args.v = v_, args.bias = bias_;
    args.cu_seqlens_q = args.cu_seqlens_kv = lengths_;
    args.layout = p_.layout, args.mask_type = p_.mask, args.scale = scale_;
    args.dropout_p = p_.dropout;
    if (p_.thd()) args.max_seqlen_q = args.max_seqlen_kv = p_.length + kShift;
  }
  void call(Run& run, const char* op, const void* args) const {
    call_attention(run, op, args, p_.plain);
  }

  Problem p_;
  float scale_;
  int64_t batch_ = 0;
  Pattern q_values_{1}, k_values_{2}, v_values_{3}, o_values_{4}, do_values_{5}, bias_values_{7};
  Pattern lse_values_{6, true};
  Tensor q_, k_, v_, bias_, lengths_;
};

// A forward in FP8 with layout bshd. The probabilities are quantised too, with a relative error of
// up to 1/16. The scores differ so much that few keys determine each result.
inline void forward_of_codes(Run& run, bool plain) {
  constexpr int64_t kHeads = 16, kDim = 128, kLength = 128;
  constexpr double kScale = 2, kOut = 16;
  const int64_t batch = run.rows(kHeads * kDim * kLength, 1);
  const Shape shape = {batch, kLength, kHeads, kDim};
  const Codes codes[] = {Codes(1, 4), Codes(2, 4), Codes(3, 4)};
  constexpr double kScaleInv[] = {0.5, 0.25, 2};
  const Quantised in[] = {{run, shape, {}}, {run, shape, {}}, {run, shape, {}}};
  const Quantised o(run, shape, {}, kOut), s(run, {1}, {}, 256);
  const Tensor lse = run.output({batch, kHeads, kLength}, DType::kF32);
  for (int i = 0; i < 3 && !run.failed(); ++i) {
    codes[i].fill(run, in[i].tensor().rowwise_codes());
    run.set(in[i].tensor().scale_inv(), 0, static_cast<float>(kScaleInv[i]));
  }
  te_fl_fused_attn_fwd_args args{};
  args.q = in[0], args.k = in[1], args.v = in[2], args.o = o, args.softmax_lse = lse;
  args.s_quant = s, args.layout = TE_FL_LAYOUT_BSHD, args.scale = kScale;
  call_attention(run, "fused_attn_fwd", &args, plain);
  int64_t row = -1;
  std::vector<double> p;
  run.expect_near(o.tensor(), "o", [&](int64_t i) {
    const int64_t token = i / kDim / kHeads, first = token / kLength * kLength;
    const auto at = [&](int64_t t) { return (t * kHeads + i / kDim % kHeads) * kDim; };
    if (i / kDim != row) {
      row = i / kDim;
      p.assign(kLength, 0);
      double top = -INFINITY, sum = 0;
      for (int64_t j = 0; j < kLength; ++j) {
        double& score = p[static_cast<size_t>(j)];
        for (int64_t e = 0; e < kDim; ++e) {
          score += codes[0].at(at(token) + e) * codes[1].at(at(first + j) + e);
        }
        score *= kScale * kScaleInv[0] * kScaleInv[1];
        top = std::max(top, score);
      }
      for (double& x : p) sum += x = std::exp(x - top);
      for (double& x : p) x /= sum;
    }
    Near v{0, 0.02};
    for (int64_t j = 0; j < kLength; ++j) {
      const double term = p[static_cast<size_t>(j)] * codes[2].at(at(first + j) + i % kDim);
      v.value += kOut * kScaleInv[2] * term;
      v.tolerance += kOut * kScaleInv[2] * std::fabs(term) / 16;
    }
    v.tolerance += std::fabs(v.value) / 16;
    return v;
  });
}

inline void enquiry(Run& run) {
  const int64_t batch = run.rows(128 * 2048, 1);
  const Pattern pattern(1);
  const Tensor q = run.input({batch, 128, 16, 128}, pattern);
  const auto answer = Tensor::empty({1}, DType::kI32);
  if (run.failed() || !answer.ok()) return run.fail(answer.ok() ? "" : answer.status().to_string());
  te_fl_get_fused_attn_backend_args args{};
  args.q = args.k = args.v = q, args.backend = answer.value();
  args.layout = TE_FL_LAYOUT_BSHD, args.is_training = 1;
  run.call("get_fused_attn_backend", &args);
  const Value fitting = [](int64_t) { return 1; };
  run.expect(answer.value(), "backend", fitting, 0, 0);
}

}  // namespace te_fl::huge::attention_calls
