// An attention forward in plain loops for wrong_plugin.cpp. It is correct except for the fault that
// a template parameter selects. Supports layouts with a batch dimension and every mask except an
// arbitrary mask tensor; no bias, ALiBi, dropout or sink.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "te_fl/backend.hpp"
#include "te_fl/dtype.hpp"
#include "te_fl/numeric/formats.hpp"
#include "te_fl/ops/attention.h"

namespace te_fl::testing {

struct AttentionView {
  const te_fl_fused_attn_fwd_args& a;
  const bool sbhd = a.layout == TE_FL_LAYOUT_SBHD;
  const int64_t b = a.q->dl.shape[sbhd ? 1 : 0], sq = a.q->dl.shape[sbhd ? 0 : 1];
  const int64_t sk = a.k->dl.shape[sbhd ? 0 : 1], h = a.q->dl.shape[2], g = a.k->dl.shape[2];
  const int64_t d = a.q->dl.shape[3], dv = a.v->dl.shape[3];

  int64_t at(int64_t n, int64_t s, int64_t head, int64_t length, int64_t heads,
             int64_t width) const {
    return ((sbhd ? s * b + n : n * length + s) * heads + head) * width;
  }
  static float get(const te_fl_tensor& t, int64_t i) {
    const void* data = backend::data<const void>(t);
    if (dtype_index(t.dl.dtype) == TE_FL_F32) return static_cast<const float*>(data)[i];
    const uint16_t bits = static_cast<const uint16_t*>(data)[i];
    return dtype_index(t.dl.dtype) == TE_FL_F16 ? numeric::fp16_to_float(bits)
                                                : numeric::bf16_to_float(bits);
  }
  static void put(const te_fl_tensor& t, int64_t i, double x) {
    void* data = backend::data<void>(t);
    const int dtype = dtype_index(t.dl.dtype);
    if (dtype == TE_FL_F32) {
      static_cast<float*>(data)[i] = static_cast<float>(x);
    } else {
      static_cast<uint16_t*>(data)[i] =
          dtype == TE_FL_F16 ? numeric::double_to_fp16(x) : numeric::double_to_bf16(x);
    }
  }
  int64_t length(const te_fl_tensor* cu, int64_t n, int64_t all) const {
    if (cu == nullptr) return all;
    const auto* sums = backend::data<const int32_t>(*cu);
    return sums[n + 1] - sums[n];
  }
  bool causal() const {
    return a.mask_type != TE_FL_MASK_TYPE_NONE && a.mask_type != TE_FL_MASK_TYPE_PADDING;
  }
};

inline bool has_shape(const te_fl_tensor& t, std::vector<int64_t> want) {
  return std::vector<int64_t>(t.dl.shape, t.dl.shape + t.dl.ndim) == want;
}

inline void plain_attention_supports(const te_fl_context&, const te_fl_fused_attn_fwd_args& a) {
  if (a.layout == TE_FL_LAYOUT_THD || a.mask_type == TE_FL_MASK_TYPE_ARBITRARY)
    backend::unsupported("takes sbhd and bshd, and no given mask");
  if (a.bias != nullptr || a.alibi_slopes != nullptr || a.dropout_p != 0 ||
      a.softmax_type != TE_FL_SOFTMAX_TYPE_VANILLA || a.saved != nullptr)
    backend::unsupported("adds nothing to the scores and drops nothing");
  for (const te_fl_tensor* t : {a.q, a.k, a.v, static_cast<const te_fl_tensor*>(a.o)})
    if (!backend::is_contiguous(*t)) backend::unsupported("takes compact tensors only");
  const AttentionView t{a};
  const auto of = [&](int64_t length, int64_t heads, int64_t width) -> std::vector<int64_t> {
    if (t.sbhd) return {length, t.b, heads, width};
    return {t.b, length, heads, width};
  };
  if (t.g == 0 || t.h % t.g != 0 || !has_shape(*a.k, of(t.sk, t.g, t.d)) ||
      !has_shape(*a.v, of(t.sk, t.g, t.dv)) || !has_shape(*a.o, of(t.sq, t.h, t.dv)) ||
      (a.softmax_lse != nullptr && !has_shape(*a.softmax_lse, {t.b, t.h, t.sq})))
    backend::invalid("q, k, v, o and softmax_lse have shapes that do not go together");
  if (a.mask_type >= TE_FL_MASK_TYPE_PADDING &&
      (a.cu_seqlens_q == nullptr || a.cu_seqlens_kv == nullptr))
    backend::invalid("a padding mask needs cu_seqlens_q and cu_seqlens_kv");
}

// no_odd_tail selects the fault: under a causal mask the dot product q.k is summed in pairs of
// elements, and the last element of an odd head size is omitted.
template <bool no_odd_tail>
void plain_attention(const te_fl_context&, const te_fl_fused_attn_fwd_args& a) {
  const AttentionView t{a};
  const bool top_left =
      a.mask_type == TE_FL_MASK_TYPE_CAUSAL || a.mask_type == TE_FL_MASK_TYPE_PADDING_CAUSAL;
  const int64_t used = no_odd_tail && t.causal() && t.d > 1 ? t.d / 2 * 2 : t.d;
  constexpr double kMasked = -std::numeric_limits<double>::infinity();
  for (int64_t n = 0; n < t.b; ++n) {
    const int64_t queries = t.length(a.cu_seqlens_q, n, t.sq);
    const int64_t keys = t.length(a.cu_seqlens_kv, n, t.sk);
    for (int64_t head = 0; head < t.h; ++head)
      for (int64_t i = 0; i < t.sq; ++i) {
        const int64_t diagonal = i + (top_left ? 0 : keys - queries);
        std::vector<double> p(static_cast<size_t>(t.sk), kMasked);
        for (int64_t j = 0; i < queries && j < keys; ++j) {
          if (t.causal() && j > diagonal) continue;
          if (a.window_left >= 0 && j < diagonal - a.window_left) continue;
          if (a.window_right >= 0 && j > diagonal + a.window_right) continue;
          const int64_t q = t.at(n, i, head, t.sq, t.h, t.d);
          const int64_t k = t.at(n, j, head / (t.h / t.g), t.sk, t.g, t.d);
          double score = 0;
          for (int64_t e = 0; e < used; ++e)
            score += double(t.get(*a.q, q + e)) * double(t.get(*a.k, k + e));
          p[static_cast<size_t>(j)] = score * double(a.scale);
        }
        const double top = p.empty() ? kMasked : *std::max_element(p.begin(), p.end());
        double sum = 0;
        for (double& x : p) sum += x = top == kMasked ? 0 : std::exp(x - top);
        if (a.softmax_lse != nullptr)
          t.put(*a.softmax_lse, (n * t.h + head) * t.sq + i,
                top == kMasked ? top : top + std::log(sum));
        for (int64_t e = 0; e < t.dv; ++e) {
          double out = 0;
          for (int64_t j = 0; sum > 0 && j < t.sk; ++j)
            out += p[static_cast<size_t>(j)] / sum *
                   double(t.get(*a.v, t.at(n, j, head / (t.h / t.g), t.sk, t.g, t.dv) + e));
          t.put(*a.o, t.at(n, i, head, t.sq, t.h, t.dv) + e, out);
        }
      }
  }
}

}  // namespace te_fl::testing
