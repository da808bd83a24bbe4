// The oracle of the reference backend's attention tests, in double precision with every matrix
// stored; and the tensors of one attention call in any layout.
#pragma once

#include <algorithm>
#include <cmath>
#include <ostream>
#include <string>
#include <vector>

#include "support/reference_call.hpp"
#include "te_fl/ops/attention.h"

namespace te_fl::testing {

inline constexpr double kInf = INFINITY;

struct Case {
  std::string name;
  int layout = TE_FL_LAYOUT_BSHD;
  int mask = TE_FL_MASK_TYPE_NONE;
  int softmax = TE_FL_SOFTMAX_TYPE_VANILLA;
  int64_t sq = 4, sk = 5, left = -1, right = -1;
  std::vector<int> q_lens = {}, kv_lens = {};      // for padding masks and thd
  std::vector<int> q_starts = {}, kv_starts = {};  // for thd with gaps
  Shape bias = {};
  int alibi = 0;  // rank of the slopes tensor; 0: no ALiBi
  float dropout = 0;
  int64_t max_q = 0, max_kv = 0;
  // Fixed sizes: several heads per group, and head sizes that differ between q and v.
  int64_t b = 2, h = 4, g = 2, d = 3, dv = 2;
  float softcap = 0;
};
inline void PrintTo(const Case& c, std::ostream* os) { *os << c.name; }

// Inputs as [b][h][s][d] and the loss sum(o * weight), all in double.
struct Problem {
  explicit Problem(const Case& c) : c(c) {
    q = random_values(c.b * c.h * c.sq * c.d, 1);
    k = random_values(c.b * c.g * c.sk * c.d, 2);
    v = random_values(c.b * c.g * c.sk * c.dv, 3);
    weight = random_values(c.b * c.h * c.sq * c.dv, 4);
    if (!c.bias.empty()) bias = random_values(count(c.bias), 5);
    slopes = random_values(c.alibi == 2 ? c.b * c.h : c.h, 6, 0, 0.5);
    sink = random_values(c.h, 7);
    mask = random_values(c.b * c.sq * c.sk, 8, 0, 2);
    for (double& m : mask) m = std::floor(m) != 0 ? 3 : 0;
    for (int64_t j = 0; j < (c.b * c.sq > 0 ? c.sk : 0); ++j)
      mask[static_cast<size_t>(j)] = 1;  // one row is fully masked
  }
  bool varlen() const { return !c.q_lens.empty(); }
  int64_t q_len(int64_t b) const { return varlen() ? c.q_lens[static_cast<size_t>(b)] : c.sq; }
  int64_t kv_len(int64_t b) const { return varlen() ? c.kv_lens[static_cast<size_t>(b)] : c.sk; }

  bool sees(int64_t b, int64_t i, int64_t j) const {
    if (i >= q_len(b) || j >= kv_len(b)) return false;
    int64_t level = i + kv_len(b) - q_len(b);  // the key position on the diagonal of query i
    bool causal = false;
    switch (c.mask) {
      case TE_FL_MASK_TYPE_CAUSAL:
      case TE_FL_MASK_TYPE_PADDING_CAUSAL:
        causal = true;
        level = i;
        break;
      case TE_FL_MASK_TYPE_CAUSAL_BOTTOM_RIGHT:
      case TE_FL_MASK_TYPE_PADDING_CAUSAL_BOTTOM_RIGHT:
        causal = true;
        break;
      case TE_FL_MASK_TYPE_ARBITRARY:
        if (mask[static_cast<size_t>((b * c.sq + i) * c.sk + j)] != 0) return false;
        break;
      default:
        break;
    }
    if (causal && j > level) return false;
    if (c.left >= 0 && j < level - c.left) return false;
    if (c.right >= 0 && j > level + c.right) return false;
    return true;
  }

  double score(int64_t b, int64_t h, int64_t i, int64_t j) const {
    const int64_t group = h * c.g / c.h;
    double s = 0;
    for (int64_t e = 0; e < c.d; ++e) {
      s += q[static_cast<size_t>(((b * c.h + h) * c.sq + i) * c.d + e)] *
           k[static_cast<size_t>(((b * c.g + group) * c.sk + j) * c.d + e)];
    }
    s *= scale;
    if (c.softcap > 0) s = c.softcap * std::tanh(s / c.softcap);
    if (!bias.empty()) {
      const int64_t head = (c.bias[0] == 1 ? 0 : b) * c.bias[1] + (c.bias[1] == 1 ? 0 : h);
      s += bias[static_cast<size_t>((head * c.sq + i) * c.sk + j)];
    }
    if (c.alibi != 0) {
      const double slope = slopes[static_cast<size_t>(c.alibi == 2 ? b * c.h + h : h)];
      s += slope * static_cast<double>(j - i - (kv_len(b) - q_len(b)));
    }
    return s;
  }

  double kept(int64_t b, int64_t h, int64_t i, int64_t j) const {
    if (c.dropout == 0) return 1;
    int64_t sq = c.sq, sk = c.sk;
    if (c.layout == TE_FL_LAYOUT_THD) {
      sq = c.max_q != 0 ? c.max_q : *std::max_element(c.q_lens.begin(), c.q_lens.end());
      sk = c.max_kv != 0 ? c.max_kv : *std::max_element(c.kv_lens.begin(), c.kv_lens.end());
    }
    const auto index = static_cast<uint64_t>(((b * c.h + h) * sq + i) * sk + j);
    const double word = numeric::dropout_word(rng.seed, rng.offset, index);
    return word / 4294967296.0 >= double{c.dropout} ? 1 / (1 - double{c.dropout}) : 0;
  }

  // Computes o as [b][h][i][dv] and lse as [b][h][i].
  void forward(std::vector<double>& o, std::vector<double>& lse) const {
    o.assign(static_cast<size_t>(c.b * c.h * c.sq * c.dv), 0);
    lse.assign(static_cast<size_t>(c.b * c.h * c.sq), -kInf);
    for (int64_t row = 0; row < c.b * c.h * c.sq; ++row) {
      const int64_t b = row / c.sq / c.h, h = row / c.sq % c.h, i = row % c.sq;
      double total = 0;
      bool any = false;
      for (int64_t j = 0; j < c.sk; ++j) {
        if (sees(b, i, j)) total += std::exp(score(b, h, i, j)), any = true;
      }
      if (!any) continue;
      if (c.softmax == TE_FL_SOFTMAX_TYPE_OFF_BY_ONE) total += 1;
      if (c.softmax == TE_FL_SOFTMAX_TYPE_LEARNABLE)
        total += std::exp(sink[static_cast<size_t>(h)]);
      lse[static_cast<size_t>(row)] = std::log(total);
      for (int64_t j = 0; j < c.sk; ++j) {
        if (!sees(b, i, j)) continue;
        const double p = std::exp(score(b, h, i, j)) / total * kept(b, h, i, j);
        const int64_t at = ((b * c.g + h * c.g / c.h) * c.sk + j) * c.dv;
        for (int64_t e = 0; e < c.dv; ++e) {
          o[static_cast<size_t>(row * c.dv + e)] += p * v[static_cast<size_t>(at + e)];
        }
      }
    }
  }
  double loss() const {
    std::vector<double> o, lse;
    forward(o, lse);
    double sum = 0;
    for (size_t i = 0; i < o.size(); ++i) sum += o[i] * weight[i];
    return sum;
  }
  void spoil_padding(std::vector<double>& x, int64_t heads, int64_t seqlen, int64_t dim,
                     int64_t (Problem::*length)(int64_t) const) const {
    for (size_t i = 0; i < x.size(); ++i) {
      const int64_t row = static_cast<int64_t>(i) / dim;
      if (row % seqlen >= (this->*length)(row / seqlen / heads)) x[i] = NAN;
    }
  }
  // Returns the gradient with respect to one of the inputs by central differences.
  std::vector<double> gradient(std::vector<double> Problem::*input) {
    std::vector<double> out;
    for (double& x : this->*input) {
      const double saved = x, step = 1e-5;
      x = saved + step;
      const double up = loss();
      x = saved - step;
      const double down = loss();
      x = saved;
      out.push_back((up - down) / (2 * step));
    }
    return out;
  }

  Case c;
  double scale = 0.625;
  te_fl_rng rng{.seed = 0x123456789abcdefu, .offset = 77};
  std::vector<double> q, k, v, weight, bias, slopes, sink, mask;
};

// The tensors of one call, in the layout of the case.
class AttentionCall {
 public:
  explicit AttentionCall(const Case& c)
      : p(c),
        q(shape(c.h, c.d, true), TE_FL_F32),
        k(shape(c.g, c.d, false), TE_FL_F32),
        v(shape(c.g, c.dv, false), TE_FL_F32),
        o(shape(c.h, c.dv, true), TE_FL_F32),
        d_o(shape(c.h, c.dv, true), TE_FL_F32),
        dq(shape(c.h, c.d, true), TE_FL_F32),
        dk(shape(c.g, c.d, false), TE_FL_F32),
        dv(shape(c.g, c.dv, false), TE_FL_F32),
        lse(thd() ? Shape{q.shape()[0], c.h} : Shape{c.b, c.h, c.sq}, TE_FL_F32),
        bias(c.bias, TE_FL_F32),
        dbias(c.bias, TE_FL_F32),
        slopes(c.alibi == 2 ? Shape{c.b, c.h} : Shape{c.h}, TE_FL_F32, p.slopes),
        mask({c.b, 1, c.sq, c.sk}, TE_FL_U8, p.mask),
        sink({c.h}, TE_FL_F32, p.sink),
        dsink({c.h}, TE_FL_F32),
        cu_q({c.b + 1}, TE_FL_I32),
        cu_kv({c.b + 1}, TE_FL_I32),
        cu_q_padded({c.b + 1}, TE_FL_I32),
        cu_kv_padded({c.b + 1}, TE_FL_I32) {
    scatter(p.q, q, true);
    scatter(p.k, k, false);
    scatter(p.v, v, false);
    scatter(p.weight, d_o, true);
    if (!c.bias.empty()) bias.fill(p.bias);
    if (p.varlen()) {
      cu_q.fill(prefix(c.q_lens));
      cu_kv.fill(prefix(c.kv_lens));
    }
    if (!c.q_starts.empty()) {
      cu_q_padded.fill(doubles(c.q_starts));
      cu_kv_padded.fill(doubles(c.kv_starts));
    }
    connect(fwd);
    connect(bwd);
    fwd.softmax_lse = lse;
    bwd.softmax_lse = lse;
    bwd.d_o = d_o;
    bwd.dq = dq;
    bwd.dk = dk;
    bwd.dv = dv;
    if (!c.bias.empty()) bwd.dbias = dbias;
    if (c.softmax == TE_FL_SOFTMAX_TYPE_LEARNABLE) bwd.dsink = dsink;
  }

  bool thd() const { return p.c.layout == TE_FL_LAYOUT_THD; }

  // Copies between [b][h][s][d] and the tensor's layout. Elements that layout thd does not store
  // (padding) are skipped; gather() returns `absent` for them.
  void scatter(const std::vector<double>& from, HostTensor& to, bool query) const {
    // Fills the padding with NaN, which must not reach any result.
    std::vector<double> out(static_cast<size_t>(to.size()), NAN);
    each(to, query, [&](size_t logical, size_t at) { out[at] = from[logical]; });
    to.fill(out);
  }
  std::vector<double> gather(const HostTensor& from, bool query, double absent = 0) const {
    const std::vector<double> in = from.values();
    const Shape& s = from.shape();
    std::vector<double> out(
        static_cast<size_t>(p.c.b * s[s.size() - 2] * (query ? p.c.sq : p.c.sk) * s.back()),
        absent);
    std::vector<bool> seen(in.size(), false);
    each(from, query, [&](size_t logical, size_t at) {
      out[logical] = in[at];
      seen[at] = true;
    });
    for (size_t i = 0; i < in.size(); ++i) {
      if (!seen[i]) {
        EXPECT_EQ(in[i], 0) << "padding token";
      }
    }
    return out;
  }

  Problem p;
  HostTensor q, k, v, o, d_o, dq, dk, dv, lse, bias, dbias, slopes, mask, sink, dsink;
  HostTensor cu_q, cu_kv, cu_q_padded, cu_kv_padded;
  te_fl_fused_attn_fwd_args fwd;
  te_fl_fused_attn_bwd_args bwd;

 private:
  static std::vector<double> doubles(const std::vector<int>& v) { return {v.begin(), v.end()}; }
  static std::vector<double> prefix(const std::vector<int>& lens) {
    std::vector<double> out = {0};
    for (int n : lens) out.push_back(out.back() + n);
    return out;
  }
  int64_t tokens(bool query) const {  // rows of thd, with two rows of padding at the end
    const auto& starts = query ? p.c.q_starts : p.c.kv_starts;
    if (!starts.empty()) return starts.back() + 2;
    return static_cast<int64_t>(prefix(query ? p.c.q_lens : p.c.kv_lens).back()) + 2;
  }
  Shape shape(int64_t heads, int64_t dim, bool query) const {
    const int64_t s = query ? p.c.sq : p.c.sk;
    if (p.c.layout == TE_FL_LAYOUT_SBHD) return {s, p.c.b, heads, dim};
    if (p.c.layout == TE_FL_LAYOUT_BSHD) return {p.c.b, s, heads, dim};
    return {tokens(query), heads, dim};
  }
  template <class F>
  void each(const HostTensor& t, bool query, F&& f) const {
    const int64_t heads = t.shape()[t.shape().size() - 2], dim = t.shape().back();
    const int64_t seqlen = query ? p.c.sq : p.c.sk;
    const auto& starts = query ? p.c.q_starts : p.c.kv_starts;
    const auto& lens = query ? p.c.q_lens : p.c.kv_lens;
    for (int64_t b = 0; b < p.c.b; ++b) {
      for (int64_t s = 0; s < seqlen; ++s) {
        int64_t position = p.c.layout == TE_FL_LAYOUT_SBHD ? s * p.c.b + b : b * seqlen + s;
        if (thd()) {
          if (s >= lens[static_cast<size_t>(b)]) continue;
          position = s + (starts.empty() ? static_cast<int>(prefix(lens)[static_cast<size_t>(b)])
                                         : starts[static_cast<size_t>(b)]);
        }
        for (int64_t h = 0; h < heads; ++h) {
          for (int64_t e = 0; e < dim; ++e) {
            f(static_cast<size_t>(((b * heads + h) * seqlen + s) * dim + e),
              static_cast<size_t>((position * heads + h) * dim + e));
          }
        }
      }
    }
  }
  template <class Args>
  void connect(Args& a) {
    const Case& c = p.c;
    a.q = q;
    a.k = k;
    a.v = v;
    a.o = o;
    if (!c.bias.empty()) a.bias = bias;
    if (c.alibi != 0) a.alibi_slopes = slopes;
    if (c.mask == TE_FL_MASK_TYPE_ARBITRARY) a.attn_mask = mask;
    if (c.softmax == TE_FL_SOFTMAX_TYPE_LEARNABLE) a.softmax_sink = sink;
    if (p.varlen()) {
      a.cu_seqlens_q = cu_q;
      a.cu_seqlens_kv = cu_kv;
    }
    if (!c.q_starts.empty()) {
      a.cu_seqlens_q_padded = cu_q_padded;
      a.cu_seqlens_kv_padded = cu_kv_padded;
    }
    a.layout = c.layout;
    a.mask_type = c.mask;
    a.softmax_type = c.softmax;
    a.scale = static_cast<float>(p.scale);
    a.softcap = c.softcap;
    a.dropout_p = c.dropout;
    a.window_left = c.left;
    a.window_right = c.right;
    a.max_seqlen_q = c.max_q;
    a.max_seqlen_kv = c.max_kv;
  }
};

// Returns lse, given as [b][h][i], in the tensor's order.
inline std::vector<double> lse_in_layout(const AttentionCall& call,
                                         const std::vector<double>& lse) {
  const Case& c = call.p.c;
  if (!call.thd()) return lse;
  std::vector<double> out(static_cast<size_t>(call.lse.size()), -kInf);
  int start = 0;
  for (int64_t b = 0; b < c.b; ++b) {
    const int begin = c.q_starts.empty() ? start : c.q_starts[static_cast<size_t>(b)];
    for (int64_t i = 0; i < c.q_lens[static_cast<size_t>(b)]; ++i) {
      for (int64_t h = 0; h < c.h; ++h) {
        out[static_cast<size_t>((begin + i) * c.h + h)] =
            lse[static_cast<size_t>((b * c.h + h) * c.sq + i)];
      }
    }
    start += c.q_lens[static_cast<size_t>(b)];
  }
  return out;
}

}  // namespace te_fl::testing
