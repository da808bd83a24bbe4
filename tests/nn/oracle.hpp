#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "nn_test_util.hpp"
#include "support/rounds.hpp"

// Double-precision reimplementations of the modules' forward computations. Gradients come from
// numerical differentiation.
namespace te_fl::nn::testing::oracle {

// y = x W^T + b; x [rows, in], W [out, in].
inline Values linear(const Values& x, const Values& w, const Values* b, int64_t in, int64_t out) {
  const int64_t rows = static_cast<int64_t>(x.size()) / in;
  Values y(static_cast<size_t>(rows * out));
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t o = 0; o < out; ++o) {
      double sum = b != nullptr ? (*b)[o] : 0;
      for (int64_t i = 0; i < in; ++i) sum += x[r * in + i] * w[o * in + i];
      y[r * out + o] = sum;
    }
  }
  return y;
}

// LayerNorm if beta is given, otherwise RMSNorm.
inline Values norm(const Values& x, const Values& gamma, const Values* beta, double eps,
                   bool zero_centered) {
  const size_t h = gamma.size();
  Values y(x.size());
  for (size_t r = 0; r < x.size() / h; ++r) {
    const double* in = x.data() + r * h;
    double mean = 0, square = 0;
    if (beta != nullptr) {
      for (size_t i = 0; i < h; ++i) mean += in[i] / static_cast<double>(h);
    }
    for (size_t i = 0; i < h; ++i) square += (in[i] - mean) * (in[i] - mean);
    const double rsigma = 1 / std::sqrt(square / static_cast<double>(h) + eps);
    for (size_t i = 0; i < h; ++i) {
      y[r * h + i] = (in[i] - mean) * rsigma * (gamma[i] + (zero_centered ? 1 : 0)) +
                     (beta != nullptr ? (*beta)[i] : 0);
    }
  }
  return y;
}

inline double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
inline double gelu(double x) {
  return 0.5 * x * (1 + std::tanh(0.7978845608 * (x + 0.044715 * x * x * x)));
}
inline double qgelu(double x) { return x * sigmoid(1.702 * x); }
inline double relu(double x) { return std::max(x, 0.0); }
inline double srelu(double x) { return relu(x) * relu(x); }
inline double silu(double x) { return x * sigmoid(x); }

// `width` is the output's last dimension.
inline Values activation(Activation which, const Values& x, int64_t width, double limit,
                         double alpha, double offset) {
  auto ungated = [&](double (*f)(double)) {
    Values y(x.size());
    std::transform(x.begin(), x.end(), y.begin(), f);
    return y;
  };
  auto gated = [&](auto f) {
    Values y(x.size() / 2);
    for (size_t r = 0; r < y.size() / width; ++r) {
      for (int64_t i = 0; i < width; ++i) {
        y[r * width + i] = f(x[r * 2 * width + i], x[r * 2 * width + width + i]);
      }
    }
    return y;
  };
  switch (which) {
    case Activation::kGelu:
      return ungated(gelu);
    case Activation::kQGelu:
      return ungated(qgelu);
    case Activation::kRelu:
      return ungated(relu);
    case Activation::kSRelu:
      return ungated(srelu);
    case Activation::kSilu:
      return ungated(silu);
    case Activation::kGeglu:
      return gated([](double a, double b) { return gelu(a) * b; });
    case Activation::kQGeglu:
      return gated([](double a, double b) { return qgelu(a) * b; });
    case Activation::kReglu:
      return gated([](double a, double b) { return relu(a) * b; });
    case Activation::kSReglu:
      return gated([](double a, double b) { return srelu(a) * b; });
    case Activation::kSwiglu:
      return gated([](double a, double b) { return silu(a) * b; });
    case Activation::kGlu:
      return gated([](double a, double b) { return sigmoid(a) * b; });
    case Activation::kClampedSwiglu:
      return gated([&](double a, double b) {
        a = std::min(a, limit);
        b = std::clamp(b, -limit, limit);
        return a * sigmoid(alpha * a) * (b + offset);
      });
  }
  throw std::runtime_error("no such activation");
}

// Returns word i mod 4 of Philox 4x32-10 (Salmon et al. 2011) at counter offset + i/4, divided by
// 2^32.
inline double philox_fraction(uint64_t seed, uint64_t offset, uint64_t i) {
  const uint64_t counter = offset + i / 4;
  std::array<uint32_t, 4> c = {static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32),
                               0, 0};
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = 0xD2511F53ull * c[0], p1 = 0xCD9E8D57ull * c[2];
    c = {static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ k0, static_cast<uint32_t>(p1),
         static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ k1, static_cast<uint32_t>(p0)};
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return c[i % 4] * 0x1p-32;
}

// Draws random numbers in the same order as the modules.
struct DropoutStream {
  uint64_t seed = 0;
  uint64_t offset = 0;
  // Returns n dropout factors, each 0 or 1/(1-p).
  Values factors(uint64_t n, double p) {
    Values f(n, 1.0);
    if (p == 0) return f;
    for (uint64_t i = 0; i < n; ++i) {
      f[i] = philox_fraction(seed, offset, i) >= static_cast<float>(p)
                 ? 1 / (1 - static_cast<double>(static_cast<float>(p)))
                 : 0;
    }
    offset += (n + 3) / 4;
    return f;
  }
};

struct Sequences {  // for each batch entry: its rows in q and in k/v
  std::vector<std::vector<int64_t>> q_rows, kv_rows;
};

// Returns full sequences in layout sbhd or bshd.
inline Sequences dense_sequences(Layout layout, int64_t batch, int64_t sq, int64_t skv) {
  Sequences s;
  auto rows = [&](int64_t b, int64_t length) {
    std::vector<int64_t> r;
    for (int64_t i = 0; i < length; ++i)
      r.push_back(layout == Layout::kSBHD ? i * batch + b : b * length + i);
    return r;
  };
  for (int64_t b = 0; b < batch; ++b) {
    s.q_rows.push_back(rows(b, sq));
    s.kv_rows.push_back(rows(b, skv));
  }
  return s;
}

struct AttentionConfig {
  int64_t heads = 1, groups = 1, dim = 1;
  int64_t value_dim = 0;  // head size of v and of the result; 0: dim
  Sequences sequences;
  MaskType mask = MaskType::kNone;
  int64_t window_left = -1, window_right = -1;
  SoftmaxType softmax = SoftmaxType::kVanilla;
  double scale = 1;
  double dropout = 0;
  std::vector<int64_t> lengths_q, lengths_kv;  // true lengths for padding masks
  std::vector<uint8_t> arbitrary;              // [Sq, Sk]
  std::vector<uint8_t> padded_q, padded_kv;    // [B, Sq], [B, Sk]: padding at any position
  Values alibi;                                // [H]
  int64_t max_q = 0, max_kv = 0;               // extents of the dropout matrix
  double softcap = 0;
};

inline AttentionConfig make_config(const DotProductAttentionOptions& o) {
  AttentionConfig c;
  c.heads = o.num_attention_heads;
  c.groups = o.num_gqa_groups == 0 ? c.heads : o.num_gqa_groups;
  c.dim = o.head_dim;
  c.value_dim = o.value_head_dim;
  c.mask = o.attention.mask_type;
  c.window_left = o.attention.window_left;
  c.window_right = o.attention.window_right;
  c.softmax = o.attention.softmax_type;
  c.scale = o.attention.softmax_scale != 0 ? o.attention.softmax_scale
                                           : 1 / std::sqrt(static_cast<double>(c.dim));
  c.dropout = o.attention.attention_dropout;
  c.softcap = o.attention.softcap;
  return c;
}

inline bool causal(MaskType m) {
  return m == MaskType::kCausal || m == MaskType::kCausalBottomRight ||
         m == MaskType::kPaddingCausal || m == MaskType::kPaddingCausalBottomRight;
}

// Attention: q [rows, H, D], k and v [rows, G, D]; returns [rows, H, D]. bias is [Sq, Sk] or empty,
// sink is [H] or empty.
inline Values attention(const AttentionConfig& c, const Values& q, const Values& k, const Values& v,
                        const Values& bias, const Values& sink, DropoutStream& stream) {
  const int64_t batch = static_cast<int64_t>(c.sequences.q_rows.size());
  const int64_t dv = c.value_dim == 0 ? c.dim : c.value_dim;
  Values out(q.size() / c.dim * dv, 0.0);
  const Values keep =
      stream.factors(static_cast<uint64_t>(batch * c.heads * c.max_q * c.max_kv), c.dropout);
  for (int64_t b = 0; b < batch; ++b) {
    const auto& q_rows = c.sequences.q_rows[b];
    const auto& kv_rows = c.sequences.kv_rows[b];
    const int64_t sq = static_cast<int64_t>(q_rows.size()),
                  sk = static_cast<int64_t>(kv_rows.size());
    const int64_t true_q = c.lengths_q.empty() ? sq : c.lengths_q[b];
    const int64_t true_k = c.lengths_kv.empty() ? sk : c.lengths_kv[b];
    // A causal mask type determines its diagonal. With every other mask type, a window aligns to
    // the bottom right.
    const bool bottom = c.mask != MaskType::kCausal && c.mask != MaskType::kPaddingCausal;
    const auto unpadded = [&](const std::vector<uint8_t>& padded, int64_t length) {
      if (padded.empty()) return length;
      const auto row = padded.begin() + b * length;
      return static_cast<int64_t>(std::count(row, row + length, 0));
    };
    const int64_t shift = !bottom ? 0
                          : c.padded_q.empty()
                              ? true_k - true_q
                              : unpadded(c.padded_kv, sk) - unpadded(c.padded_q, sq);
    for (int64_t h = 0; h < c.heads; ++h) {
      const int64_t g = h / (c.heads / c.groups);
      for (int64_t i = 0; i < sq; ++i) {
        Values score(sk, -std::numeric_limits<double>::infinity());
        double top = -std::numeric_limits<double>::infinity();
        for (int64_t j = 0; j < sk; ++j) {
          if (i >= true_q || j >= true_k) continue;
          if (causal(c.mask) && j > i + shift) continue;
          if (c.window_left >= 0 && j < i + shift - c.window_left) continue;
          if (c.window_right >= 0 && j > i + shift + c.window_right) continue;
          if (!c.arbitrary.empty() && c.arbitrary[i * sk + j] != 0) continue;
          if (!c.padded_q.empty() && c.padded_q[b * sq + i] != 0) continue;
          if (!c.padded_kv.empty() && c.padded_kv[b * sk + j] != 0) continue;
          double s = 0;
          for (int64_t d = 0; d < c.dim; ++d) {
            s += q[(q_rows[i] * c.heads + h) * c.dim + d] *
                 k[(kv_rows[j] * c.groups + g) * c.dim + d];
          }
          s *= c.scale;
          if (c.softcap > 0) s = c.softcap * std::tanh(s / c.softcap);
          if (!bias.empty()) s += bias[i * sk + j];
          if (!c.alibi.empty()) s += c.alibi[h] * static_cast<double>(j - i - (sk - sq));
          score[j] = s;
          top = std::max(top, s);
        }
        if (std::isinf(top)) continue;  // a fully masked row gives zeros
        double sum = 0;
        if (c.softmax == SoftmaxType::kOffByOne) sum += std::exp(-top);
        if (c.softmax == SoftmaxType::kLearnable) sum += std::exp(sink[h] - top);
        for (double s : score) sum += std::exp(s - top);
        for (int64_t j = 0; j < sk; ++j) {
          const double p =
              std::exp(score[j] - top) / sum *
              keep[c.dropout == 0 ? 0 : ((b * c.heads + h) * c.max_q + i) * c.max_kv + j];
          for (int64_t d = 0; d < dv; ++d) {
            out[(q_rows[i] * c.heads + h) * dv + d] += p * v[(kv_rows[j] * c.groups + g) * dv + d];
          }
        }
      }
    }
  }
  return out;
}

// Applies RoPE in place to x [rows, heads, dim]: to the first `rotated` columns, with one position
// per row.
inline void rope(Values& x, int64_t heads, int64_t dim, int64_t rotated, bool interleaved,
                 const std::vector<int64_t>& positions) {
  for (size_t r = 0; r < positions.size(); ++r) {
    for (int64_t h = 0; h < heads; ++h) {
      double* p = x.data() + (static_cast<int64_t>(r) * heads + h) * dim;
      for (int64_t i = 0; i < rotated / 2; ++i) {
        // The table is F32, so the oracle rounds the angle too.
        const double angle = static_cast<float>(
            static_cast<double>(positions[r]) *
            std::pow(10000.0, -2.0 * static_cast<double>(i) / static_cast<double>(rotated)));
        double& a = p[interleaved ? 2 * i : i];
        double& b = p[interleaved ? 2 * i + 1 : i + rotated / 2];
        const double a0 = a, b0 = b;
        a = a0 * std::cos(angle) - b0 * std::sin(angle);
        b = b0 * std::cos(angle) + a0 * std::sin(angle);
      }
    }
  }
}

inline const Values* maybe(const Params& params, const std::string& name) {
  auto found = params.find(name);
  return found == params.end() ? nullptr : &found->second;
}

struct MlpConfig {
  int64_t hidden = 0, ffn = 0;
  Activation activation = Activation::kGelu;
  double epsilon = 1e-5;
  bool zero_centered = false;
  double limit = 7, alpha = 1.702, offset = 1;
};

inline Values mlp(const MlpConfig& c, const Params& params, const std::string& prefix,
                  const Values& x) {
  const Values z = norm(x, params.at(prefix + "layer_norm_weight"),
                        maybe(params, prefix + "layer_norm_bias"), c.epsilon, c.zero_centered);
  const int64_t wide = is_gated(c.activation) ? 2 * c.ffn : c.ffn;
  const Values pre = linear(z, params.at(prefix + "fc1_weight"), maybe(params, prefix + "fc1_bias"),
                            c.hidden, wide);
  const Values act = activation(c.activation, pre, c.ffn, c.limit, c.alpha, c.offset);
  return linear(act, params.at(prefix + "fc2_weight"), maybe(params, prefix + "fc2_bias"), c.ffn,
                c.hidden);
}

struct MhaConfig {
  int64_t hidden = 0;
  AttentionConfig attention;
  double epsilon = 1e-5;
  bool zero_centered = false;
  bool input_norm = true;
  int64_t rotated = 0;  // 0: no RoPE
  bool interleaved = false;
  std::vector<int64_t> positions;  // per row of x
  bool cross = false;              // keys and values come from params' "encoder"
  bool split = false;              // separate query_weight, key_weight and value_weight
  bool weights_interleaved = true;
  QkNorm qk_norm = QkNorm::kNone;
  double qk_epsilon = 1e-6;
  bool qk_norm_first = false;
  std::vector<int64_t> kv_positions;  // per key; empty: positions
  bool adds_bias = true;              // proj adds its bias
};

// y = x W^T + b, where the weight may be split into parts.
inline Values split_linear(const Params& params, const std::string& prefix,
                           const std::vector<std::string>& parts, const Values& x, int64_t in) {
  Values w, b;
  for (const std::string& part : parts) {
    const Values& weight = params.at(prefix + part + "weight");
    w.insert(w.end(), weight.begin(), weight.end());
    if (const Values* bias = maybe(params, prefix + part + "bias")) {
      b.insert(b.end(), bias->begin(), bias->end());
    }
  }
  return linear(x, w, b.empty() ? nullptr : &b, in, static_cast<int64_t>(w.size()) / in);
}

// Normalises each row of `dim` elements in place.
inline void norm_heads(Values& x, QkNorm kind, const Params& params, const std::string& prefix,
                       int64_t dim, double eps) {
  if (kind == QkNorm::kNone) return;
  if (kind != QkNorm::kL2) {
    x = norm(x, params.at(prefix + "weight"), maybe(params, prefix + "bias"), eps, false);
    return;
  }
  for (size_t r = 0; r < x.size(); r += static_cast<size_t>(dim)) {
    double square = 0;
    for (int64_t i = 0; i < dim; ++i) square += x[r + i] * x[r + i];
    for (int64_t i = 0; i < dim; ++i) x[r + i] /= std::sqrt(square + eps);
  }
}

// Returns the columns [begin + g * stride, begin + g * stride + length) for g < count of a matrix
// [rows, width], joined into one matrix.
inline Values columns(const Values& x, int64_t width, int64_t begin, int64_t length, int64_t count,
                      int64_t stride) {
  Values out;
  for (size_t r = 0; r < x.size(); r += static_cast<size_t>(width)) {
    for (int64_t g = 0; g < count; ++g) {
      const auto from = x.begin() + static_cast<int64_t>(r) + begin + g * stride;
      out.insert(out.end(), from, from + length);
    }
  }
  return out;
}

inline Values mha(const MhaConfig& c, const Params& params, const std::string& prefix,
                  const Values& x, const Values& bias, DropoutStream& stream,
                  Values* normed = nullptr) {
  const auto& a = c.attention;
  const std::string first =
      prefix + (c.input_norm ? (c.cross ? "layernorm_query." : "layernorm_qkv.")
                             : (c.cross ? "query_layer." : "qkv."));
  Values z = x;
  if (c.input_norm) {
    z = norm(x, params.at(first + "layer_norm_weight"), maybe(params, first + "layer_norm_bias"),
             c.epsilon, c.zero_centered);
  }
  if (normed != nullptr) *normed = z;
  const bool interleaved = c.weights_interleaved && !c.split;
  const int64_t per = a.heads / a.groups, D = a.dim, kv = a.groups * D;
  Values q, k, v;
  if (c.cross) {
    using Parts = std::vector<std::string>;
    const bool split_q = c.split && c.input_norm;
    q = split_linear(params, first, split_q ? Parts{"query_"} : Parts{""}, z, c.hidden);
    const Values both =
        split_linear(params, prefix + "key_value.", c.split ? Parts{"key_", "value_"} : Parts{""},
                     params.at("encoder"), c.hidden);
    k = interleaved ? columns(both, 2 * kv, 0, D, a.groups, 2 * D)
                    : columns(both, 2 * kv, 0, kv, 1, 0);
    v = interleaved ? columns(both, 2 * kv, D, D, a.groups, 2 * D)
                    : columns(both, 2 * kv, kv, kv, 1, 0);
  } else {
    const int64_t width = a.heads * D + 2 * kv, group = (per + 2) * D;
    const std::vector<std::string> parts =
        c.split ? std::vector<std::string>{"query_", "key_", "value_"}
                : std::vector<std::string>{""};
    const Values mixed = split_linear(params, first, parts, z, c.hidden);
    q = interleaved ? columns(mixed, width, 0, per * D, a.groups, group)
                    : columns(mixed, width, 0, a.heads * D, 1, 0);
    k = interleaved ? columns(mixed, width, per * D, D, a.groups, group)
                    : columns(mixed, width, a.heads * D, kv, 1, 0);
    v = interleaved ? columns(mixed, width, (per + 1) * D, D, a.groups, group)
                    : columns(mixed, width, a.heads * D + kv, kv, 1, 0);
  }
  const auto norms = [&] {
    norm_heads(q, c.qk_norm, params, prefix + "q_norm.", D, c.qk_epsilon);
    norm_heads(k, c.qk_norm, params, prefix + "k_norm.", D, c.qk_epsilon);
  };
  if (c.qk_norm_first) norms();
  if (c.rotated > 0) {
    rope(q, a.heads, D, c.rotated, c.interleaved, c.positions);
    rope(k, a.groups, D, c.rotated, c.interleaved,
         c.kv_positions.empty() ? c.positions : c.kv_positions);
  }
  if (!c.qk_norm_first) norms();
  const Values* sink = maybe(params, prefix + "core_attention.softmax_offset");
  const Values o = attention(a, q, k, v, bias, sink == nullptr ? Values{} : *sink, stream);
  return linear(o, params.at(prefix + "proj.weight"),
                c.adds_bias ? maybe(params, prefix + "proj.bias") : nullptr, a.heads * D, c.hidden);
}

struct LayerConfig {
  MhaConfig mha;
  MhaConfig inter;  // cross-attention of a decoder
  MlpConfig mlp;
  double hidden_dropout = 0;
  double drop_path = 0;
  bool parallel = false;
  bool decoder = false;
  bool post_norm_residual = false;
  bool output_norm = false;
  int64_t paths = 1;  // extent of the first dimension, whose entries drop path drops as a unit
};

// residual + drop_path(dropout(branch))
inline Values add_branch(const LayerConfig& c, const Values& residual, const Values& branch,
                         double drop_path, DropoutStream& stream) {
  const Values keep = stream.factors(branch.size(), c.hidden_dropout);
  const Values path = drop_path == 0 ? Values(static_cast<size_t>(c.paths), 1.0)
                                     : stream.factors(static_cast<uint64_t>(c.paths), drop_path);
  const size_t width = branch.size() / path.size();
  Values y = residual;
  for (size_t i = 0; i < y.size(); ++i) y[i] += keep[i] * path[i / width] * branch[i];
  return y;
}

inline Values layer(const LayerConfig& c, const Params& params, const Values& x,
                    DropoutStream stream) {
  Values normed;
  const Values attended = mha(c.mha, params, "self_attention.", x, {}, stream, &normed);
  const bool post = c.post_norm_residual;
  Values h = add_branch(c, post && c.mha.input_norm ? normed : x, attended, c.drop_path, stream);
  if (c.decoder) {
    const Values crossed = mha(c.inter, params, "inter_attention.", h, {}, stream, &normed);
    h = add_branch(c, post ? normed : h, crossed, 0, stream);
  }
  const Values& mlp_input = c.parallel ? x : h;
  const Values transformed = mlp(c.mlp, params, "layernorm_mlp.", mlp_input);
  if (post) {
    normed =
        norm(mlp_input, params.at("layernorm_mlp.layer_norm_weight"),
             maybe(params, "layernorm_mlp.layer_norm_bias"), c.mlp.epsilon, c.mlp.zero_centered);
  }
  const Values y = add_branch(c, post ? normed : h, transformed, c.drop_path, stream);
  if (!c.output_norm) return y;
  return norm(y, params.at("layernorm.weight"), maybe(params, "layernorm.bias"), c.mlp.epsilon,
              c.mlp.zero_centered);
}

// The loss is the sum of weight * f(params). Central differences give its gradient for every named
// input.
using Function = std::function<Values(const Params&)>;
inline double dot(const Values& a, const Values& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

// Checks the gradient `got` of input `name` against central differences. Tensors with more than
// `max_checked` elements are sampled. Sanitizer builds check few elements, because the sanitizer
// tests the modules and not the oracle.
inline void expect_gradient(const Function& f, Params inputs, const std::string& name,
                            const Values& weight, const Values& got, double tolerance,
                            int64_t max_checked = te_fl::testing::rounds(48)) {
  SCOPED_TRACE("gradient of " + name);
  Values& values = inputs.at(name);
  ASSERT_EQ(values.size(), got.size());
  const int64_t n = static_cast<int64_t>(values.size());
  Random random(n);
  double largest = 0;
  for (double g : got) largest = std::max(largest, std::abs(g));
  ASSERT_GT(largest, 0) << "the gradient is zero everywhere: the case tests nothing";
  for (int64_t checked = 0; checked < std::min(n, max_checked); ++checked) {
    const int64_t i = n <= max_checked ? checked : random.below(n);
    const double saved = values[i], step = 1e-5;
    values[i] = saved + step;
    const double above = dot(weight, f(inputs));
    values[i] = saved - step;
    const double below = dot(weight, f(inputs));
    values[i] = saved;
    const double want = (above - below) / (2 * step);
    ASSERT_NEAR(got[i], want, tolerance * (largest + std::abs(want)))
        << "element " << i << " of " << n;
  }
}

// Removes the gradients whose name ends with `suffix` from `got` and expects them to be 0: a shift
// common to all keys does not change the softmax.
inline void expect_no_gradient(std::map<std::string, Values>& got, const std::string& suffix) {
  for (auto it = got.begin(); it != got.end();) {
    if (!it->first.ends_with(suffix)) {
      ++it;
      continue;
    }
    for (const double g : it->second) EXPECT_NEAR(g, 0, 1e-5) << it->first;
    it = got.erase(it);
  }
}

// Expects a module's output and all its gradients to match f. `got` holds "y", "x" and the
// parameters' gradients.
inline void expect_matches(const Function& f, const Params& inputs, const Values& weight,
                           const std::map<std::string, Values>& got, double tolerance = 2e-5) {
  const Values y = f(inputs);
  const Values& have = got.at("y");
  ASSERT_EQ(have.size(), y.size());
  double largest = 0;
  for (double v : y) largest = std::max(largest, std::abs(v));
  for (size_t i = 0; i < y.size(); ++i)
    ASSERT_NEAR(have[i], y[i], tolerance * largest) << "output " << i;
  for (const auto& [name, gradient] : got) {
    if (name == "y") continue;
    expect_gradient(f, inputs, name, weight, gradient, tolerance);
    if (::testing::Test::HasFatalFailure()) return;
  }
}

}  // namespace te_fl::nn::testing::oracle
