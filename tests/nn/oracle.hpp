#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "nn_test_util.hpp"

// The modules' forward computations written again, plainly and in double precision. Gradients come
// from differentiating them numerically.
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

// LayerNorm with beta, RMSNorm without.
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
                         double alpha) {
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
        return a * sigmoid(alpha * a) * (b + 1);
      });
  }
  throw std::runtime_error("no such activation");
}

// Philox 4x32-10 (Salmon et al. 2011): word i mod 4 of counter offset + i/4, as a fraction of 2^32.
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

// Draws in the order in which the modules draw.
struct DropoutStream {
  uint64_t seed = 0;
  uint64_t offset = 0;
  // 0 or 1/(1-p) per element.
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

struct Sequences {  // batch entries as row numbers of q and of k/v
  std::vector<std::vector<int64_t>> q_rows, kv_rows;
};

// sbhd or bshd, every sequence full.
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
  Sequences sequences;
  MaskType mask = MaskType::kNone;
  int64_t window_left = -1, window_right = -1;
  SoftmaxType softmax = SoftmaxType::kVanilla;
  double scale = 1;
  double dropout = 0;
  std::vector<int64_t> lengths_q, lengths_kv;  // true lengths, padding masks
  std::vector<uint8_t> arbitrary;              // [Sq, Sk]
  Values alibi;                                // [H]
  int64_t max_q = 0, max_kv = 0;               // extents of the dropout matrix
};

inline bool causal(MaskType m) {
  return m == MaskType::kCausal || m == MaskType::kCausalBottomRight ||
         m == MaskType::kPaddingCausal || m == MaskType::kPaddingCausalBottomRight;
}

// q [rows, H, D], k and v [rows, G, D] -> [rows, H, D]; bias [Sq, Sk] or empty; sink [H] or empty.
inline Values attention(const AttentionConfig& c, const Values& q, const Values& k, const Values& v,
                        const Values& bias, const Values& sink, DropoutStream& stream) {
  const int64_t batch = static_cast<int64_t>(c.sequences.q_rows.size());
  Values out(q.size(), 0.0);
  const Values keep =
      stream.factors(static_cast<uint64_t>(batch * c.heads * c.max_q * c.max_kv), c.dropout);
  for (int64_t b = 0; b < batch; ++b) {
    const auto& q_rows = c.sequences.q_rows[b];
    const auto& kv_rows = c.sequences.kv_rows[b];
    const int64_t sq = static_cast<int64_t>(q_rows.size()),
                  sk = static_cast<int64_t>(kv_rows.size());
    const int64_t true_q = c.lengths_q.empty() ? sq : c.lengths_q[b];
    const int64_t true_k = c.lengths_kv.empty() ? sk : c.lengths_kv[b];
    const bool bottom =
        c.mask == MaskType::kCausalBottomRight || c.mask == MaskType::kPaddingCausalBottomRight;
    const int64_t shift = bottom ? true_k - true_q : 0;
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
          double s = 0;
          for (int64_t d = 0; d < c.dim; ++d) {
            s += q[(q_rows[i] * c.heads + h) * c.dim + d] *
                 k[(kv_rows[j] * c.groups + g) * c.dim + d];
          }
          s *= c.scale;
          if (!bias.empty()) s += bias[i * sk + j];
          if (!c.alibi.empty()) s += c.alibi[h] * static_cast<double>(j - i - (sk - sq));
          score[j] = s;
          top = std::max(top, s);
        }
        if (std::isinf(top)) continue;  // fully masked: zeros
        double sum = 0;
        if (c.softmax == SoftmaxType::kOffByOne) sum += std::exp(-top);
        if (c.softmax == SoftmaxType::kLearnable) sum += std::exp(sink[h] - top);
        for (double s : score) sum += std::exp(s - top);
        for (int64_t j = 0; j < sk; ++j) {
          const double p =
              std::exp(score[j] - top) / sum *
              keep[c.dropout == 0 ? 0 : ((b * c.heads + h) * c.max_q + i) * c.max_kv + j];
          for (int64_t d = 0; d < c.dim; ++d) {
            out[(q_rows[i] * c.heads + h) * c.dim + d] +=
                p * v[(kv_rows[j] * c.groups + g) * c.dim + d];
          }
        }
      }
    }
  }
  return out;
}

// In place on [rows, heads, dim]; positions per row; `rotated` leading columns.
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
  double limit = 7, alpha = 1.702;
};

inline Values mlp(const MlpConfig& c, const Params& params, const std::string& prefix,
                  const Values& x) {
  const Values z = norm(x, params.at(prefix + "layer_norm_weight"),
                        maybe(params, prefix + "layer_norm_bias"), c.epsilon, c.zero_centered);
  const int64_t wide = is_gated(c.activation) ? 2 * c.ffn : c.ffn;
  const Values pre = linear(z, params.at(prefix + "fc1_weight"), maybe(params, prefix + "fc1_bias"),
                            c.hidden, wide);
  const Values act = activation(c.activation, pre, c.ffn, c.limit, c.alpha);
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
};

inline Values mha(const MhaConfig& c, const Params& params, const std::string& prefix,
                  const Values& x, const Values& bias, DropoutStream& stream) {
  const auto& a = c.attention;
  const std::string qkv = prefix + (c.input_norm ? "layernorm_qkv." : "qkv.");
  Values z = x;
  if (c.input_norm) {
    z = norm(x, params.at(qkv + "layer_norm_weight"), maybe(params, qkv + "layer_norm_bias"),
             c.epsilon, c.zero_centered);
  }
  const int64_t width = (a.heads + 2 * a.groups) * a.dim;
  const Values mixed =
      linear(z, params.at(qkv + "weight"), maybe(params, qkv + "bias"), c.hidden, width);
  const int64_t rows = static_cast<int64_t>(mixed.size()) / width;
  const int64_t per = a.heads / a.groups;
  Values q(rows * a.heads * a.dim), k(rows * a.groups * a.dim), v(rows * a.groups * a.dim);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t g = 0; g < a.groups; ++g) {
      const double* from = mixed.data() + r * width + g * (per + 2) * a.dim;
      std::copy_n(from, per * a.dim, q.data() + (r * a.heads + g * per) * a.dim);
      std::copy_n(from + per * a.dim, a.dim, k.data() + (r * a.groups + g) * a.dim);
      std::copy_n(from + (per + 1) * a.dim, a.dim, v.data() + (r * a.groups + g) * a.dim);
    }
  }
  if (c.rotated > 0) {
    rope(q, a.heads, a.dim, c.rotated, c.interleaved, c.positions);
    rope(k, a.groups, a.dim, c.rotated, c.interleaved, c.positions);
  }
  const Values* sink = maybe(params, prefix + "core_attention.softmax_offset");
  const Values o = attention(a, q, k, v, bias, sink == nullptr ? Values{} : *sink, stream);
  return linear(o, params.at(prefix + "proj.weight"), maybe(params, prefix + "proj.bias"),
                a.heads * a.dim, c.hidden);
}

struct LayerConfig {
  MhaConfig mha;
  MlpConfig mlp;
  double hidden_dropout = 0;
  bool parallel = false;
};

inline Values layer(const LayerConfig& c, const Params& params, const Values& x,
                    DropoutStream stream) {
  const Values attended = mha(c.mha, params, "self_attention.", x, {}, stream);
  Values keep = stream.factors(x.size(), c.hidden_dropout);
  Values h = x;
  for (size_t i = 0; i < h.size(); ++i) h[i] += keep[i] * attended[i];
  const Values transformed = mlp(c.mlp, params, "layernorm_mlp.", c.parallel ? x : h);
  keep = stream.factors(x.size(), c.hidden_dropout);
  for (size_t i = 0; i < h.size(); ++i) h[i] += keep[i] * transformed[i];
  return h;
}

// loss = sum of weight * f(params); every named input is differentiated by central differences.
using Function = std::function<Values(const Params&)>;
inline double dot(const Values& a, const Values& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

// Largest number of elements checked per tensor; larger ones are sampled.
inline void expect_gradient(const Function& f, Params inputs, const std::string& name,
                            const Values& weight, const Values& got, double tolerance,
                            int64_t max_checked = 48) {
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

// Output and all gradients of a module against f. `got` holds "y", "x" and the parameters'
// gradients.
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
