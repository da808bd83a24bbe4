#include "conformance/attention_case.hpp"

#include <algorithm>
#include <cstdio>

#include "conformance/compare.hpp"
#include "conformance/oracle_quantize.hpp"

namespace te_fl::conformance::attention {

std::string lengths_name(const std::vector<int64_t>& v) {
  std::string text;
  for (int64_t n : v) text += (text.empty() ? "" : "+") + std::to_string(n);
  return text;
}

std::string variant_name(const Variant& v) {
  static const char* const layouts[] = {"sbhd", "bshd", "thd"};
  static const char* const masks[] = {"none",     "causal",         "causal_bottom_right",
                                      "padding",  "padding_causal", "padding_causal_bottom_right",
                                      "arbitrary"};
  std::string name = std::string(name_of(v.dtype)) + "/" + layouts[v.layout] + "/" +
                     dims_name({v.b, v.sq, v.sk}) + "/H=" + dims_name({v.h, v.g, v.d, v.dv}) + "/" +
                     masks[v.mask];
  if (v.mask == TE_FL_MASK_TYPE_ARBITRARY)
    name += std::string(".") + name_of(v.mask_dtype) + "." + dims_name(v.mask_bh);
  if (v.out >= 0) name += std::string("/out=") + name_of(v.out);
  if (!v.len_q.empty()) name += "/q=" + lengths_name(v.len_q) + "/k=" + lengths_name(v.len_k);
  if (!v.gap_q.empty()) name += "/gaps";
  if (v.left >= 0 || v.right >= 0)
    name += "/window=" + std::to_string(v.left) + "," + std::to_string(v.right);
  if (v.softmax != TE_FL_SOFTMAX_TYPE_VANILLA)
    name += v.softmax == TE_FL_SOFTMAX_TYPE_OFF_BY_ONE ? "/off_by_one" : "/learnable";
  if (v.dropout > 0) name += "/dropout";
  if (v.rng_offset > 1000) name += "/offset";
  if (v.rng_seed == kOtherSeed) name += "/other_seed";
  if (v.rng_in_memory) name += "/state";
  if (v.bias >= 0) name += std::string("/bias=") + name_of(v.bias) + "." + dims_name(v.bias_bh);
  if (v.alibi > 0) name += v.alibi == 1 ? "/alibi" : "/alibi.batch";
  if (v.packed) name += "/packed";
  if (v.max_given) name += "/max_seqlen";
  if (v.no_lse) name += "/no_lse";
  if (v.saved) name += "/saved";
  if (v.unrounded) name += "/unrounded";
  if (v.current) name += "/current";
  if (v.columns) name += "/columns";
  const auto number = [&](const char* what, double x) {
    char text[32];
    std::snprintf(text, sizeof text, "/%s=%g", what, x);
    name += text;
  };
  if (v.scale != 0.25) number("scale", v.scale);
  if (v.scale_p != kScaleP) number("scale_p", static_cast<double>(v.scale_p));
  if (v.softcap != 0) number("softcap", static_cast<double>(v.softcap));
  return name;
}

std::vector<int64_t> starts(const std::vector<int64_t>& lengths, const std::vector<int64_t>& gaps) {
  std::vector<int64_t> at{0};
  for (size_t i = 0; i < lengths.size(); ++i)
    at.push_back(at.back() + lengths[i] + (gaps.empty() ? 0 : gaps[i]));
  return at;
}

Dims shape_of(const Variant& v, const Attention& a, bool query, int64_t heads, int64_t width) {
  if (v.layout == kT) return {query ? a.tokens_q : a.tokens_k, heads, width};
  const int64_t s = query ? v.sq : v.sk;
  return v.layout == kS ? Dims{s, v.b, heads, width} : Dims{v.b, s, heads, width};
}

void lengths(Problem& p, const Variant& v, Attention& a) {
  a.len_q = v.len_q, a.len_k = v.len_k;
  if (v.len_q.empty()) return;
  auto cumulative = [&](const char* name, const std::vector<int64_t>& cu) {
    p.in(name, TE_FL_I32, {v.b + 1},
         [cu](Random&, int64_t i) { return static_cast<double>(cu[i]); });
  };
  cumulative("cu_seqlens_q", starts(v.len_q, {}));
  cumulative("cu_seqlens_kv", starts(v.len_k, {}));
  if (v.layout != kT) return;
  const auto sq = starts(v.len_q, v.gap_q), sk = starts(v.len_k, v.gap_k);
  a.start_q = sq, a.start_k = sk, a.tokens_q = sq.back(), a.tokens_k = sk.back();
  if (v.gap_q.empty()) return;
  cumulative("cu_seqlens_q_padded", sq);
  cumulative("cu_seqlens_kv_padded", sk);
}

// q, k, v as slices of one [.., 3, H, D] tensor.
void packed_inputs(Problem& p, const Spec& spec, const Variant& v, Inputs& in,
                   const char* const names[3], Role role, std::shared_ptr<Buffer> storage,
                   Tensor** out) {
  const Dims shape = in.q_shape;
  const size_t rank = shape.size();
  Dims strides(rank);
  strides[rank - 1] = 1, strides[rank - 2] = v.d, strides[rank - 3] = 3 * v.h * v.d;
  for (size_t i = rank - 3; i-- > 0;) strides[i] = strides[i + 1] * shape[i + 1];
  const double scale = spec.quantised() ? static_cast<double>(spec.scale) : 1;
  for (int64_t i = 0; i < 3; ++i) {
    out[i] =
        p.strided(names[i], role, spec, shape, strides, gaussian(scale), storage, i * v.h * v.d);
    if (!spec.quantised() || role == Role::kOut) continue;
    store(TE_FL_F32, out[i]->scale_inv->data(), 0, 1 / scale);
    out[i]->scale_inv->freeze();
  }
}

Fill mask_fill(const Variant& v) {
  const int64_t k = std::max<int64_t>(v.sk, 1), q = std::max<int64_t>(v.sq, 1);
  // One row of each matrix is masked completely.
  return [=](Random& r, int64_t i) { return i / k % q == 2 ? 1.0 : r.uniform() < 0.3 ? 1.0 : 0.0; };
}

Inputs make_inputs(Problem& p, const Variant& v) {
  Inputs in;
  Attention& a = *in.a;
  a.layout = v.layout, a.mask = v.mask, a.softmax = v.softmax, a.b = v.b, a.sq = v.sq, a.sk = v.sk,
  a.h = v.h, a.g = v.g;
  a.d = v.d, a.dv = v.dv, a.scale = static_cast<double>(static_cast<float>(v.scale)),
  a.dropout = v.dropout, a.left = v.left, a.right = v.right, a.softcap = v.softcap;
  p.set_rng(v.rng_seed, v.rng_offset, v.rng_in_memory);
  a.rng = p.rng;
  lengths(p, v, a);
  in.q_shape = shape_of(v, a, true, v.h, v.d), in.k_shape = shape_of(v, a, false, v.g, v.d);
  in.v_shape = shape_of(v, a, false, v.g, v.dv), in.o_shape = shape_of(v, a, true, v.h, v.dv);
  in.lse_shape = v.layout == kT ? Dims{a.tokens_q, v.h} : Dims{v.b, v.h, v.sq};
  if (v.packed) {
    const char* const names[3] = {"q", "k", "v"};
    Tensor* qkv[3];
    int64_t n = 3;
    for (int64_t e : in.q_shape) n *= e;
    Spec spec(v.dtype);
    if (is_fp8(v.dtype)) spec = Spec(kE4, TE_FL_SCALING_TENSOR, true, false), spec.scale = 64;
    packed_inputs(p, spec, v, in, names, Role::kIn,
                  std::make_shared<Buffer>(bytes_for(v.dtype, n), uint8_t{0}), qkv);
    in.q = qkv[0], in.k = qkv[1], in.v = qkv[2];
    in.q->data->freeze();
  } else {
    const Spec spec = is_fp8(v.dtype)
                          ? Spec(kE4, TE_FL_SCALING_TENSOR, true, false, TE_FL_QUANT_COMPUTE_SCALE)
                          : Spec(v.dtype);
    in.q = p.quantised_in("q", spec, in.q_shape), in.k = p.quantised_in("k", spec, in.k_shape),
    in.v = p.quantised_in("v", spec, in.v_shape);
  }
  a.q = dequantised(*in.q), a.k = dequantised(*in.k), a.v = dequantised(*in.v);
  if (v.bias >= 0) {
    in.bias = p.in("bias", v.bias, {v.bias_bh[0], v.bias_bh[1], v.sq, v.sk});
    a.bias = in.bias->values(), a.bias_b = v.bias_bh[0], a.bias_h = v.bias_bh[1];
  }
  if (v.alibi > 0) {
    in.alibi =
        p.in("alibi_slopes", TE_FL_F32, v.alibi == 1 ? Dims{v.h} : Dims{v.b, v.h}, gaussian(0.1));
    a.alibi = in.alibi->values();
  }
  if (v.mask == TE_FL_MASK_TYPE_ARBITRARY) {
    in.mask =
        p.in("attn_mask", v.mask_dtype, {v.mask_bh[0], v.mask_bh[1], v.sq, v.sk}, mask_fill(v));
    a.given_mask = in.mask->values(), a.mask_b = v.mask_bh[0], a.mask_h = v.mask_bh[1];
  }
  if (v.softmax == TE_FL_SOFTMAX_TYPE_LEARNABLE) {
    in.sink = p.in("softmax_sink", TE_FL_F32, {v.h});
    a.sink = in.sink->values();
  }
  p.set("layout", v.layout), p.set("mask_type", v.mask), p.set("softmax_type", v.softmax),
      p.set("scale", v.scale);
  p.set("dropout_p", static_cast<double>(v.dropout));
  p.set("window_left", static_cast<double>(v.left)),
      p.set("window_right", static_cast<double>(v.right));
  if (v.softcap != 0) p.set("softcap", static_cast<double>(v.softcap));
  if (v.max_given)
    p.set("max_seqlen_q", static_cast<double>(v.sq)),
        p.set("max_seqlen_kv", static_cast<double>(v.sk));
  return in;
}

// The relative rounding error when probabilities or score gradients are rounded to this dtype as an
// operand of the second GEMM; 0 if they stay in FP32.
double unit(int dtype) { return dtype == TE_FL_BF16 ? 0x1p-8 : dtype == TE_FL_F16 ? 0x1p-11 : 0; }

// The error tolerance of a sum of n products of elements of this dtype.
double product_tolerance(int dtype, double n, double magnitude) {
  return sum_tolerance(n, magnitude) * (is_fp8(dtype) ? kFp8Sums : 1);
}

double score_error(int dtype, const Attention& a, const AttentionRow& row) {
  return product_tolerance(dtype, static_cast<double>(a.d), row.size) +
         0x1p-22 * std::fabs(std::isfinite(row.lse) ? row.lse : 0);
}

// FP8: returns x after quantisation with the given scale and dequantisation. `step` receives the
// distance between neighbouring FP8 values at x.
double through_fp8(int dtype, double x, float scale, double* step) {
  const Format& f = format_of(dtype);
  const double scaled = static_cast<double>(static_cast<float>(x) * scale);
  const double magnitude = std::clamp(std::fabs(scaled), power_of_two(1 - f.bias), f.max);
  *step = power_of_two(binary_exponent(magnitude) - f.mantissa_bits) / static_cast<double>(scale);
  return decode_bits(f, encode_bits(f, scaled)) / static_cast<double>(scale);
}
// The largest change of x's quantised value if x changes by at most `error`.
double code_tolerance(int dtype, double x, double error, float scale) {
  double step;
  const double here = through_fp8(dtype, x, scale, &step);
  return std::max(through_fp8(dtype, x + error, scale, &step) - here,
                  here - through_fp8(dtype, x - error, scale, &step));
}
// The largest spacing of FP8 values at exp(score - maximum): an eighth of the value (E4M3 has three
// mantissa bits), but at least the spacing of subnormals.
double most_step(double e, float scale) {
  return std::max(e / 8, 0x1p-9 / static_cast<double>(scale));
}

int64_t product(const Dims& dims) {
  int64_t n = 1;
  for (int64_t d : dims) n *= d;
  return n;
}

// One element of the product of a row of probabilities with V: the sum, the sum of magnitudes, and
// the rounding error of FP8 probabilities as a variance and as a maximum.
struct Column {
  double sum = 0, size = 0, variance = 0, most = 0;
};

Forward attend(const Variant& v, const Inputs& in) {
  const Attention& a = *in.a;
  Forward r;
  std::vector<Column> columns(static_cast<size_t>(a.dv));
  r.o.assign(static_cast<size_t>(product(in.o_shape)), 0), r.tolerance = r.o,
                                                           r.skip_o.assign(r.o.size(), a.thd());
  r.lse.assign(static_cast<size_t>(product(in.lse_shape)), -infinity()),
      r.lse_tolerance.assign(r.lse.size(), 0), r.skip_lse.assign(r.lse.size(), a.thd());
  for (int64_t n = 0; n < a.b; ++n)
    for (int64_t head = 0; head < a.h; ++head)
      for (int64_t i = 0; i < (a.thd() ? a.q_length(n) : a.sq); ++i) {
        const AttentionRow row = attention_row(a, n, head, i);
        const int64_t oa = a.at(n, i, head, a.h, a.dv, true), la = a.lse_at(n, i, head);
        r.lse[la] = row.lse,
        r.skip_lse[la] = row.lse == -infinity() && a.softmax != TE_FL_SOFTMAX_TYPE_VANILLA;
        const double error = score_error(v.dtype, a, row);
        r.lse_tolerance[la] = error;
        std::fill(columns.begin(), columns.end(), Column{});
        const double top = row.p.empty() ? 0 : *std::max_element(row.p.begin(), row.p.end());
        const double kept = 1 / (1 - static_cast<double>(a.dropout));
        const float scale = std::min(v.scale_p, static_cast<float>(format_of(kE4).max / kept));
        for (int64_t j = 0; j < static_cast<int64_t>(row.p.size()); ++j) {
          double p = a.kept(n, head, i, j) ? row.p[j] * kept : 0, step = 0, other = 0;
          r.p_max = std::max(r.p_max, p);
          if (v.rounds() && p > 0) {
            other = top * most_step(p / top, scale);
            p = top * through_fp8(kE4, p / top, scale, &step), step *= top;
          }
          const double* values = &a.v[a.at(n, j, a.kv_head(head), a.g, a.dv, false)];
          for (int64_t e = 0; e < a.dv; ++e) {
            Column& c = columns[e];
            if (v.rounds()) {
              c.variance += (step * step + other * other) / 12 * values[e] * values[e];
              c.most += (step + other) / 2 * std::fabs(values[e]);
            }
            c.sum += p * values[e], c.size += std::fabs(p * values[e]);
          }
        }
        for (int64_t e = 0; e < a.dv; ++e) {
          const auto& [sum, size, variance, most] = columns[e];
          r.o[oa + e] = sum, r.skip_o[oa + e] = 0;
          r.tolerance[oa + e] =
              size * (2 * error + 2 * unit(v.dtype)) +
              product_tolerance(v.dtype, static_cast<double>(row.p.size()), size) +
              std::min(6 * std::sqrt(variance), most);
        }
      }
  return r;
}

// Adds the contribution of query row i to all gradients.
void differentiate_row(const Variant& v, const Attention& a, const BackwardInputs& x, int64_t n,
                       int64_t head, int64_t i, Gradients& r) {
  const int64_t oa = a.at(n, i, head, a.h, a.dv, true), qa = a.at(n, i, head, a.h, a.d, true);
  const double lse = x.lse[a.lse_at(n, i, head)];
  for (int64_t e = 0; e < a.d; ++e) r.skip_q[qa + e] = 0;
  double delta = 0, delta_size = 0;
  for (int64_t e = 0; e < a.dv; ++e)
    delta += x.d_o[oa + e] * x.o[oa + e], delta_size += std::fabs(x.d_o[oa + e] * x.o[oa + e]);
  const AttentionRow row = attention_row(a, n, head, i);
  if (lse == -infinity()) return;
  const double error = score_error(v.dtype, a, row) + 0x1p-22 * std::fabs(lse), low = unit(v.dtype),
               sums = product_tolerance(v.dtype, static_cast<double>(std::max(a.sq, a.sk)), 1),
               codes = is_fp8(v.dtype) ? sums : 0;
  if (!a.sink.empty() && !r.dsink.empty()) {
    const double p = std::exp(a.sink[head] - lse);
    r.dsink[head] -= p * delta;
    r.dsink_tolerance[head] += p * (sum_tolerance(static_cast<double>(a.dv), delta_size) * 2 +
                                    std::fabs(delta) * (2 * error + 1e-5));
  }
  for (int64_t j = 0; j < a.k_length(n); ++j) {
    if (a.masked(n, head, i, j)) continue;
    const int64_t ka = a.at(n, j, a.kv_head(head), a.g, a.d, false),
                  va = a.at(n, j, a.kv_head(head), a.g, a.dv, false);
    double size, flip_p = 0, flip_s = 0, step = 0, dp = 0, dp_size = 0, cap_slope;
    const double p = std::exp(a.score(n, head, i, j, &size, &cap_slope) - lse);
    const double keep = a.kept(n, head, i, j) ? 1 / (1 - static_cast<double>(a.dropout)) : 0;
    double dropped = p * keep;
    if (v.rounds()) {
      flip_p = code_tolerance(kE4, dropped, 2 * error * dropped, v.scale_p);
      dropped = through_fp8(kE4, dropped, v.scale_p, &step);
    }
    for (int64_t e = 0; e < a.dv; ++e) {
      dp += x.d_o[oa + e] * a.v[va + e], dp_size += std::fabs(x.d_o[oa + e] * a.v[va + e]);
      r.dv[va + e] += dropped * x.d_o[oa + e];
      r.dv_tolerance[va + e] +=
          std::fabs(x.d_o[oa + e]) *
          (flip_p + dropped * (v.rounds() ? sums : 2 * error + 2 * low + 1e-6 + codes));
    }
    const double real = p * (dp * keep - delta);
    double ds = real;
    const double magnitude = dp_size * keep + delta_size;
    // In FP8, |dp * keep - delta| is used instead of the magnitudes of its terms: the error of FP8
    // is too large to be treated as a rounding error of these terms.
    const double ds_tolerance =
        p * ((is_fp8(v.dtype) ? std::fabs(dp * keep - delta) : magnitude) * 2 * error +
             1e-6 * magnitude + product_tolerance(v.dtype, static_cast<double>(a.dv), magnitude));
    // The tolerance of the gradient before the softcap. The cap's derivative is 1 - t^2, which
    // changes by at most twice the change of t = score / softcap.
    double dx_tolerance = ds_tolerance * cap_slope;
    if (a.softcap > 0) dx_tolerance += std::fabs(ds) * (2 * error / a.softcap + 1e-6);
    ds *= cap_slope;
    r.ds_max = std::max(r.ds_max, std::fabs(ds));
    if (v.rounds()) {
      flip_s = code_tolerance(kE5, ds, dx_tolerance, kScaleDs);
      ds = through_fp8(kE5, ds, kScaleDs, &step);
    }
    if (!r.dbias.empty()) {
      const int64_t at =
          (((a.bias_b == 1 ? 0 : n) * a.bias_h + (a.bias_h == 1 ? 0 : head)) * a.sq + i) * a.sk + j;
      r.dbias[at] += real, r.dbias_tolerance[at] += ds_tolerance + low * std::fabs(real);
    }
    for (int64_t e = 0; e < a.d; ++e) {
      const double factor = a.scale,
                   tolerance = v.rounds() ? flip_s + sums * std::fabs(ds)
                                          : dx_tolerance + (2 * low + 1e-6 + codes) * std::fabs(ds);
      r.dq[qa + e] += factor * ds * a.k[ka + e],
          r.dq_tolerance[qa + e] += std::fabs(factor * a.k[ka + e]) * tolerance;
      r.dk[ka + e] += factor * ds * a.q[qa + e],
          r.dk_tolerance[ka + e] += std::fabs(factor * a.q[qa + e]) * tolerance;
    }
  }
}

Gradients differentiate(const Variant& v, const Inputs& in, const BackwardInputs& x) {
  const Attention& a = *in.a;
  Gradients r;
  r.dq.assign(a.q.size(), 0), r.dk.assign(a.k.size(), 0), r.dv.assign(a.v.size(), 0),
      r.dbias.assign(a.bias.size(), 0), r.dsink.assign(a.sink.size(), 0);
  r.dq_tolerance = r.dq, r.dk_tolerance = r.dk, r.dv_tolerance = r.dv, r.dbias_tolerance = r.dbias,
  r.dsink_tolerance = r.dsink;
  r.skip_q.assign(r.dq.size(), a.thd()), r.skip_k.assign(r.dk.size(), a.thd()),
      r.skip_v.assign(r.dv.size(), a.thd());
  for (int64_t n = 0; n < a.b; ++n) {
    for (int64_t j = 0; j < (a.thd() ? a.k_length(n) : a.sk); ++j)
      for (int64_t head = 0; head < a.g; ++head) {
        for (int64_t e = 0; e < a.d; ++e) r.skip_k[a.at(n, j, head, a.g, a.d, false) + e] = 0;
        for (int64_t e = 0; e < a.dv; ++e) r.skip_v[a.at(n, j, head, a.g, a.dv, false) + e] = 0;
      }
    for (int64_t head = 0; head < a.h; ++head)
      for (int64_t i = 0; i < (a.thd() ? a.q_length(n) : a.sq); ++i)
        differentiate_row(v, a, x, n, head, i, r);
  }
  return r;
}

}  // namespace te_fl::conformance::attention
