#include "conformance/compare.hpp"
#include "conformance/oracle_attention.hpp"
#include "conformance/oracle_quantize.hpp"

// Attention. Slack of a result: an error e of a score is a relative error e of a probability; products of low-precision
// tensors may round probabilities and score gradients to the tensors' type once on the way to the second product.
namespace te_fl::conformance {
namespace {

constexpr int kS = TE_FL_LAYOUT_SBHD, kB = TE_FL_LAYOUT_BSHD, kT = TE_FL_LAYOUT_THD;
constexpr int kE4 = TE_FL_F8E4M3, kE5 = TE_FL_F8E5M2;

struct Variant {
  int dtype = TE_FL_F32;  // FP8: the forward's type
  int out = -1;           // of o and dq, dk, dv; -1: dtype
  int layout = kB, mask = TE_FL_MASK_TYPE_NONE, softmax = TE_FL_SOFTMAX_TYPE_VANILLA;
  int64_t b = 2, sq = 7, sk = 9, h = 4, g = 4, d = 16, dv = 16;
  int64_t left = -1, right = -1;
  float dropout = 0;
  int bias = -1;  // dtype
  Dims bias_bh = {1, 1};
  int alibi = 0;  // 1: [H], 2: [B, H]
  Dims mask_bh = {1, 1};
  int mask_dtype = TE_FL_U8;
  std::vector<int64_t> len_q = {}, len_k = {};
  std::vector<int64_t> gap_q = {}, gap_k = {};  // thd: unused tokens after each sequence
  bool packed = false, max_given = false, no_lse = false, saved = false, large = false;
  double scale = 0.25;
};

std::string lengths_name(const std::vector<int64_t>& v) {
  std::string text;
  for (int64_t n : v) text += (text.empty() ? "" : "+") + std::to_string(n);
  return text;
}

std::string variant_name(const Variant& v) {
  static const char* const layouts[] = {"sbhd", "bshd", "thd"};
  static const char* const masks[] = {"none", "causal", "causal_bottom_right", "padding", "padding_causal", "padding_causal_bottom_right", "arbitrary"};
  std::string name = std::string(name_of(v.dtype)) + "/" + layouts[v.layout] + "/" + dims_name({v.b, v.sq, v.sk}) + "/H=" + dims_name({v.h, v.g, v.d, v.dv}) + "/" + masks[v.mask];
  if (v.mask == TE_FL_MASK_TYPE_ARBITRARY) name += std::string(".") + name_of(v.mask_dtype) + "." + dims_name(v.mask_bh);
  if (v.out >= 0) name += std::string("/out=") + name_of(v.out);
  if (!v.len_q.empty()) name += "/q=" + lengths_name(v.len_q) + "/k=" + lengths_name(v.len_k);
  if (!v.gap_q.empty()) name += "/gaps";
  if (v.left >= 0 || v.right >= 0) name += "/window=" + std::to_string(v.left) + "," + std::to_string(v.right);
  if (v.softmax != TE_FL_SOFTMAX_TYPE_VANILLA) name += v.softmax == TE_FL_SOFTMAX_TYPE_OFF_BY_ONE ? "/off_by_one" : "/learnable";
  if (v.dropout > 0) name += "/dropout";
  if (v.bias >= 0) name += std::string("/bias=") + name_of(v.bias) + "." + dims_name(v.bias_bh);
  if (v.alibi > 0) name += v.alibi == 1 ? "/alibi" : "/alibi.batch";
  if (v.packed) name += "/packed";
  if (v.max_given) name += "/max_seqlen";
  if (v.no_lse) name += "/no_lse";
  if (v.saved) name += "/saved";
  return name + (v.scale != 0.25 ? "/scale=-0.5" : "");
}

std::vector<int64_t> starts(const std::vector<int64_t>& lengths, const std::vector<int64_t>& gaps) {
  std::vector<int64_t> at{0};
  for (size_t i = 0; i < lengths.size(); ++i) at.push_back(at.back() + lengths[i] + (gaps.empty() ? 0 : gaps[i]));
  return at;
}

// What forward and backward share: the input tensors, and the oracle's problem made from them.
struct Inputs {
  Tensor *q, *k, *v;
  Tensor *bias = nullptr, *alibi = nullptr, *mask = nullptr, *sink = nullptr;
  Dims o_shape, q_shape, k_shape, v_shape, lse_shape;
  std::shared_ptr<Attention> a = std::make_shared<Attention>();
};

Dims shape_of(const Variant& v, const Attention& a, bool query, int64_t heads, int64_t width) {
  if (v.layout == kT) return {query ? a.tokens_q : a.tokens_k, heads, width};
  const int64_t s = query ? v.sq : v.sk;
  return v.layout == kS ? Dims{s, v.b, heads, width} : Dims{v.b, s, heads, width};
}

void lengths(Problem& p, const Variant& v, Attention& a) {
  a.len_q = v.len_q, a.len_k = v.len_k;
  if (v.len_q.empty()) return;
  auto cumulative = [&](const char* name, const std::vector<int64_t>& cu) {
    p.in(name, TE_FL_I32, {v.b + 1}, [cu](Random&, int64_t i) { return static_cast<double>(cu[i]); });
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
void packed_inputs(Problem& p, const Variant& v, Inputs& in, const char* const names[3], Role role, std::shared_ptr<Buffer> storage, Tensor** out) {
  const Dims shape = in.q_shape;
  const size_t rank = shape.size();
  Dims strides(rank);
  strides[rank - 1] = 1, strides[rank - 2] = v.d, strides[rank - 3] = 3 * v.h * v.d;
  for (size_t i = rank - 3; i-- > 0;) strides[i] = strides[i + 1] * shape[i + 1];
  for (int64_t i = 0; i < 3; ++i) out[i] = p.strided(names[i], role, v.dtype, shape, strides, gaussian(), storage, i * v.h * v.d);
}

Fill mask_fill(const Variant& v) {
  const int64_t k = std::max<int64_t>(v.sk, 1), q = std::max<int64_t>(v.sq, 1);
  // One row of each matrix is masked whole.
  return [=](Random& r, int64_t i) { return i / k % q == 2 ? 1.0 : r.uniform() < 0.3 ? 1.0 : 0.0; };
}

Inputs make_inputs(Problem& p, const Variant& v) {
  Inputs in;
  Attention& a = *in.a;
  a.layout = v.layout, a.mask = v.mask, a.softmax = v.softmax, a.b = v.b, a.sq = v.sq, a.sk = v.sk, a.h = v.h, a.g = v.g;
  a.d = v.d, a.dv = v.dv, a.scale = static_cast<double>(static_cast<float>(v.scale)), a.dropout = v.dropout, a.left = v.left, a.right = v.right;
  p.rng = {0xfeedu, 3, nullptr};
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
    packed_inputs(p, v, in, names, Role::kIn, std::make_shared<Buffer>(bytes_for(v.dtype, n), uint8_t{0}), qkv);
    in.q = qkv[0], in.k = qkv[1], in.v = qkv[2];
    in.q->data->freeze();
  } else {
    const Spec spec = is_fp8(v.dtype) ? Spec(kE4, TE_FL_SCALING_TENSOR, true, false, TE_FL_QUANT_COMPUTE_SCALE) : Spec(v.dtype);
    in.q = p.quantised_in("q", spec, in.q_shape), in.k = p.quantised_in("k", spec, in.k_shape), in.v = p.quantised_in("v", spec, in.v_shape);
  }
  a.q = dequantised(*in.q), a.k = dequantised(*in.k), a.v = dequantised(*in.v);
  if (v.bias >= 0) {
    in.bias = p.in("bias", v.bias, {v.bias_bh[0], v.bias_bh[1], v.sq, v.sk});
    a.bias = in.bias->values(), a.bias_b = v.bias_bh[0], a.bias_h = v.bias_bh[1];
  }
  if (v.alibi > 0) {
    in.alibi = p.in("alibi_slopes", TE_FL_F32, v.alibi == 1 ? Dims{v.h} : Dims{v.b, v.h}, gaussian(0.1));
    a.alibi = in.alibi->values();
  }
  if (v.mask == TE_FL_MASK_TYPE_ARBITRARY) {
    in.mask = p.in("attn_mask", v.mask_dtype, {v.mask_bh[0], v.mask_bh[1], v.sq, v.sk}, mask_fill(v));
    a.given_mask = in.mask->values(), a.mask_b = v.mask_bh[0], a.mask_h = v.mask_bh[1];
  }
  if (v.softmax == TE_FL_SOFTMAX_TYPE_LEARNABLE) {
    in.sink = p.in("softmax_sink", TE_FL_F32, {v.h});
    a.sink = in.sink->values();
  }
  p.set("layout", v.layout), p.set("mask_type", v.mask), p.set("softmax_type", v.softmax), p.set("scale", v.scale);
  p.set("dropout_p", static_cast<double>(v.dropout));
  p.set("window_left", static_cast<double>(v.left)), p.set("window_right", static_cast<double>(v.right));
  if (v.max_given) p.set("max_seqlen_q", static_cast<double>(v.sq)), p.set("max_seqlen_kv", static_cast<double>(v.sk));
  return in;
}

// Rounding that a low-precision second factor may bring.
double unit(int dtype) { return dtype == TE_FL_BF16 ? 0x1p-8 : dtype == TE_FL_F16 ? 0x1p-11 : 0; }

double score_error(const Attention& a, const AttentionRow& row) { return sum_slack(static_cast<double>(a.d), row.size) + 0x1p-22 * std::fabs(std::isfinite(row.lse) ? row.lse : 0); }

// FP8: a value after the trip through codes of the given scale; `step` gets the distance of neighbouring codes.
double through_fp8(int dtype, double x, float scale, double* step) {
  const Format& f = format_of(dtype);
  const double scaled = static_cast<double>(static_cast<float>(x) * scale);
  const double magnitude = std::clamp(std::fabs(scaled), std::ldexp(1.0, 1 - f.bias), f.max);
  *step = std::ldexp(1.0, std::ilogb(magnitude) - f.mantissa_bits) / static_cast<double>(scale);
  return decode_bits(f, encode_bits(f, scaled)) / static_cast<double>(scale);
}

struct Forward {
  std::vector<double> o, slack, lse, lse_slack;
  std::vector<uint8_t> skip_o, skip_lse;  // tokens outside every sequence
  double p_max = 0;
};

constexpr float kScaleP = 256, kScaleDs = 64;

int64_t product(const Dims& dims) {
  int64_t n = 1;
  for (int64_t d : dims) n *= d;
  return n;
}

Forward attend(const Variant& v, const Inputs& in) {
  const Attention& a = *in.a;
  Forward r;
  r.o.assign(static_cast<size_t>(product(in.o_shape)), 0), r.slack = r.o, r.skip_o.assign(r.o.size(), a.thd());
  r.lse.assign(static_cast<size_t>(product(in.lse_shape)), -infinity()), r.lse_slack.assign(r.lse.size(), 0), r.skip_lse.assign(r.lse.size(), a.thd());
  for (int64_t n = 0; n < a.b; ++n)
    for (int64_t head = 0; head < a.h; ++head)
      for (int64_t i = 0; i < (a.thd() ? a.q_length(n) : a.sq); ++i) {
        const AttentionRow row = attention_row(a, n, head, i);
        const int64_t oa = a.at(n, i, head, a.h, a.dv, true), la = a.lse_at(n, i, head);
        r.lse[la] = row.lse, r.skip_lse[la] = row.lse == -infinity() && a.softmax != TE_FL_SOFTMAX_TYPE_VANILLA;
        r.lse_slack[la] = score_error(a, row);
        for (int64_t e = 0; e < a.dv; ++e) {
          double sum = 0, size = 0, flip = 0;
          for (int64_t j = 0; j < static_cast<int64_t>(row.p.size()); ++j) {
            double p = a.kept(n, head, i, j) ? row.p[j] / (1 - static_cast<double>(a.dropout)) : 0, step = 0;
            r.p_max = std::max(r.p_max, p);
            if (is_fp8(v.dtype)) p = through_fp8(kE4, p, kScaleP, &step);
            const double value = a.v[a.at(n, j, a.kv_head(head), a.g, a.dv, false) + e];
            sum += p * value, size += std::fabs(p * value), flip = std::max(flip, step * std::fabs(value));
          }
          r.o[oa + e] = sum, r.skip_o[oa + e] = 0;
          r.slack[oa + e] = size * (2 * score_error(a, row) + 2 * unit(v.dtype)) + sum_slack(static_cast<double>(row.p.size()), size) + 2 * flip;
        }
      }
  return r;
}

Spec output_spec(const Variant& v, int fp8) {
  if (!is_fp8(v.dtype)) return Spec(v.out >= 0 ? v.out : v.dtype);
  if (v.out >= 0) return Spec(v.out);
  Spec s(fp8, TE_FL_SCALING_TENSOR, true, false);
  s.scale = fp8 == kE4 ? 64.0f : 512.0f;
  return s;
}

// Scale, scale_inv and amax alone.
Tensor* quant_only(Problem& p, const char* name, int dtype, float scale, Role role) {
  Spec s(dtype, TE_FL_SCALING_TENSOR, false, false);
  s.scale = scale, s.amax_before = 1e-3f;
  Tensor* t = p.strided(name, Role::kOut, s, {1}, {}, constant(0));
  t->role = role;
  if (role != Role::kIn) return t;
  store(TE_FL_F32, t->scale_inv->data(), 0, 1 / static_cast<double>(scale));
  t->scale_inv->freeze();
  return t;
}

void expect_output(Problem& p, Tensor* t, std::vector<double> want, std::vector<double> slack, std::vector<uint8_t> skip) {
  Expectation& e = t->spec.quantised() ? p.expect_dequantised(t, std::move(want), std::move(slack)) : p.expect(t, std::move(want), std::move(slack));
  e.skip = std::move(skip);
}

void forward(Problem& p, const Variant& v) {
  const Inputs in = make_inputs(p, v);
  Tensor* o = p.out("o", output_spec(v, kE4), in.o_shape);
  Tensor* lse = v.no_lse ? nullptr : p.out("softmax_lse", TE_FL_F32, in.lse_shape);
  Tensor* s = is_fp8(v.dtype) ? quant_only(p, "s_quant", kE4, kScaleP, Role::kInOut) : nullptr;
  if (v.saved) p.saved_storage = 0;
  p.oracle([&p, v, in, o, lse, s] {
    Forward r = attend(v, in);
    expect_output(p, o, r.o, r.slack, r.skip_o);
    if (lse != nullptr) p.expect(lse, r.lse, r.lse_slack).skip = r.skip_lse;
    if (s != nullptr) p.expect_dequantised(s, {r.p_max});
  });
}

struct Gradients {
  std::vector<double> dq, dk, dv, dbias, dsink;
  std::vector<double> dq_slack, dk_slack, dv_slack, dbias_slack, dsink_slack;
  std::vector<uint8_t> skip_q, skip_k, skip_v;
  double ds_max = 0;
};

struct BackwardInputs {
  std::vector<double> d_o, o, lse;
};

// One query row's part of every gradient.
void differentiate_row(const Variant& v, const Attention& a, const BackwardInputs& x, int64_t n, int64_t head, int64_t i, Gradients& r) {
  const int64_t oa = a.at(n, i, head, a.h, a.dv, true), qa = a.at(n, i, head, a.h, a.d, true);
  const double lse = x.lse[a.lse_at(n, i, head)];
  for (int64_t e = 0; e < a.d; ++e) r.skip_q[qa + e] = 0;
  double delta = 0, delta_size = 0;
  for (int64_t e = 0; e < a.dv; ++e) delta += x.d_o[oa + e] * x.o[oa + e], delta_size += std::fabs(x.d_o[oa + e] * x.o[oa + e]);
  const AttentionRow row = attention_row(a, n, head, i);
  if (lse == -infinity()) return;
  const double error = score_error(a, row) + 0x1p-22 * std::fabs(lse), low = unit(v.dtype);
  if (!a.sink.empty() && !r.dsink.empty()) {
    const double p = std::exp(a.sink[head] - lse);
    r.dsink[head] -= p * delta;
    r.dsink_slack[head] += p * (sum_slack(static_cast<double>(a.dv), delta_size) * 2 + std::fabs(delta) * (2 * error + 1e-5));
  }
  for (int64_t j = 0; j < a.k_length(n); ++j) {
    if (a.masked(n, head, i, j)) continue;
    const int64_t ka = a.at(n, j, a.kv_head(head), a.g, a.d, false), va = a.at(n, j, a.kv_head(head), a.g, a.dv, false);
    double size, step_p = 0, step_s = 0, dp = 0, dp_size = 0;
    const double p = std::exp(a.score(n, head, i, j, &size) - lse);
    const double keep = a.kept(n, head, i, j) ? 1 / (1 - static_cast<double>(a.dropout)) : 0;
    double dropped = p * keep;
    if (is_fp8(v.dtype)) dropped = through_fp8(kE4, dropped, kScaleP, &step_p);
    for (int64_t e = 0; e < a.dv; ++e) {
      dp += x.d_o[oa + e] * a.v[va + e], dp_size += std::fabs(x.d_o[oa + e] * a.v[va + e]);
      r.dv[va + e] += dropped * x.d_o[oa + e];
      r.dv_slack[va + e] += std::fabs(x.d_o[oa + e]) * (dropped * (2 * error + 2 * low + 1e-6) + 0.5 * step_p);
    }
    const double real = p * (dp * keep - delta);
    double ds = real;
    const double ds_slack = p * ((dp_size * keep + delta_size) * (2 * error + 1e-6) + sum_slack(static_cast<double>(a.dv), dp_size * keep + delta_size));
    r.ds_max = std::max(r.ds_max, std::fabs(ds));
    if (is_fp8(v.dtype)) ds = through_fp8(kE5, ds, kScaleDs, &step_s);
    if (!r.dbias.empty()) {
      const int64_t at = (((a.bias_b == 1 ? 0 : n) * a.bias_h + (a.bias_h == 1 ? 0 : head)) * a.sq + i) * a.sk + j;
      r.dbias[at] += real, r.dbias_slack[at] += ds_slack + low * std::fabs(real);
    }
    for (int64_t e = 0; e < a.d; ++e) {
      const double factor = a.scale, slack = ds_slack + 2 * low * std::fabs(ds) + 1e-6 * std::fabs(ds) + 0.5 * step_s;
      r.dq[qa + e] += factor * ds * a.k[ka + e], r.dq_slack[qa + e] += std::fabs(factor * a.k[ka + e]) * slack;
      r.dk[ka + e] += factor * ds * a.q[qa + e], r.dk_slack[ka + e] += std::fabs(factor * a.q[qa + e]) * slack;
    }
  }
}

Gradients differentiate(const Variant& v, const Inputs& in, const BackwardInputs& x) {
  const Attention& a = *in.a;
  Gradients r;
  r.dq.assign(a.q.size(), 0), r.dk.assign(a.k.size(), 0), r.dv.assign(a.v.size(), 0), r.dbias.assign(a.bias.size(), 0), r.dsink.assign(a.sink.size(), 0);
  r.dq_slack = r.dq, r.dk_slack = r.dk, r.dv_slack = r.dv, r.dbias_slack = r.dbias, r.dsink_slack = r.dsink;
  r.skip_q.assign(r.dq.size(), a.thd()), r.skip_k.assign(r.dk.size(), a.thd()), r.skip_v.assign(r.dv.size(), a.thd());
  for (int64_t n = 0; n < a.b; ++n) {
    for (int64_t j = 0; j < (a.thd() ? a.k_length(n) : a.sk); ++j)
      for (int64_t head = 0; head < a.g; ++head) {
        for (int64_t e = 0; e < a.d; ++e) r.skip_k[a.at(n, j, head, a.g, a.d, false) + e] = 0;
        for (int64_t e = 0; e < a.dv; ++e) r.skip_v[a.at(n, j, head, a.g, a.dv, false) + e] = 0;
      }
    for (int64_t head = 0; head < a.h; ++head)
      for (int64_t i = 0; i < (a.thd() ? a.q_length(n) : a.sq); ++i) differentiate_row(v, a, x, n, head, i, r);
  }
  return r;
}

void backward(Problem& p, const Variant& v) {
  const Inputs in = make_inputs(p, v);
  const bool fp8 = is_fp8(v.dtype);
  const Forward f = attend(v, in);
  const Spec grad_in = fp8 ? Spec(kE5, TE_FL_SCALING_TENSOR, true, false, TE_FL_QUANT_COMPUTE_SCALE) : Spec(v.dtype);
  const Spec o_in = fp8 ? Spec(kE4, TE_FL_SCALING_TENSOR, true, false, TE_FL_QUANT_COMPUTE_SCALE) : Spec(v.dtype);
  Tensor* d_o = p.quantised_in("d_o", grad_in, in.o_shape);
  Tensor* o = p.quantised_in("o", o_in, in.o_shape, [f](Random&, int64_t i) { return f.o[i]; });
  Tensor* lse = p.in("softmax_lse", TE_FL_F32, in.lse_shape, [f](Random&, int64_t i) { return f.lse[i]; });
  Tensor* grads[3];
  if (v.packed) {
    const char* const names[3] = {"dq", "dk", "dv"};
    Inputs copy = in;
    packed_inputs(p, v, copy, names, Role::kOut, std::make_shared<Buffer>(in.q->data->size(), uint8_t{0xff}), grads);
  } else {
    grads[0] = p.out("dq", output_spec(v, kE5), in.q_shape), grads[1] = p.out("dk", output_spec(v, kE5), in.k_shape), grads[2] = p.out("dv", output_spec(v, kE5), in.v_shape);
  }
  Tensor* dbias = in.bias == nullptr ? nullptr : p.out("dbias", v.bias, in.bias->shape);
  Tensor* dsink = in.sink == nullptr ? nullptr : p.out("dsink", TE_FL_F32, {v.h});
  if (fp8) quant_only(p, "s_quant", kE4, kScaleP, Role::kIn);
  Tensor* dp = fp8 ? quant_only(p, "dp_quant", kE5, kScaleDs, Role::kInOut) : nullptr;
  p.oracle([&p, v, in, d_o, o, lse, dq = grads[0], dk = grads[1], dv = grads[2], dbias, dsink, dp] {
    Gradients r = differentiate(v, in, {dequantised(*d_o), dequantised(*o), lse->values()});
    expect_output(p, dq, r.dq, r.dq_slack, r.skip_q);
    expect_output(p, dk, r.dk, r.dk_slack, r.skip_k);
    expect_output(p, dv, r.dv, r.dv_slack, r.skip_v);
    if (dbias != nullptr) p.expect(dbias, r.dbias, r.dbias_slack);
    if (dsink != nullptr) p.expect(dsink, r.dsink, r.dsink_slack);
    if (dp != nullptr) p.expect_dequantised(dp, {r.ds_max}, {0.1 * r.ds_max});
  });
}

void add_shapes(std::vector<Variant>& all) {
  for (int dtype : {TE_FL_F32, TE_FL_F16, TE_FL_BF16}) {
    for (int layout : {kS, kB}) all.push_back({.dtype = dtype, .layout = layout});
    all.push_back({.dtype = dtype, .layout = kT, .b = 3, .sq = 7, .sk = 9, .len_q = {5, 7, 2}, .len_k = {9, 4, 6}});
  }
  all.push_back({.dtype = TE_FL_BF16, .out = TE_FL_F32});
  for (int layout : {kS, kB}) {
    all.push_back({.layout = layout, .b = 1, .sq = 1, .sk = 1, .h = 1, .g = 1, .d = 1, .dv = 1});
    all.push_back({.layout = layout, .b = 1, .sq = 1, .sk = 131, .h = 3, .g = 1, .d = 20, .dv = 20});  // one query: decoding
    all.push_back({.layout = layout, .b = 3, .sq = 13, .sk = 17, .h = 6, .g = 2, .d = 18, .dv = 10});
    all.push_back({.layout = layout, .b = 0});
    all.push_back({.layout = layout, .sq = 0});
    all.push_back({.layout = layout, .sk = 0});  // no keys: every row is fully masked
    all.push_back({.layout = layout, .sq = 9, .sk = 9, .packed = true});
  }
  all.push_back({.b = 1, .sq = 67, .sk = 131, .h = 2, .g = 2, .d = 64, .dv = 64});
  all.push_back({.dtype = TE_FL_BF16, .layout = kS, .mask = TE_FL_MASK_TYPE_CAUSAL, .b = 1, .sq = 257, .sk = 257, .h = 4, .g = 2, .d = 64, .dv = 64, .large = true});
  all.push_back({.dtype = TE_FL_BF16, .layout = kT, .b = 2, .sq = 6, .sk = 6, .len_q = {6, 3}, .len_k = {6, 3}, .packed = true});
  all.push_back({.scale = -0.5});
}

void add_masks(std::vector<Variant>& all) {
  for (int layout : {kS, kB}) {
    for (int mask : {TE_FL_MASK_TYPE_CAUSAL, TE_FL_MASK_TYPE_CAUSAL_BOTTOM_RIGHT}) {
      all.push_back({.layout = layout, .mask = mask, .sq = 13, .sk = 13});
      all.push_back({.layout = layout, .mask = mask, .sq = 5, .sk = 13});
      all.push_back({.layout = layout, .mask = mask, .sq = 13, .sk = 5});  // bottom-right: the first queries see nothing
      all.push_back({.layout = layout, .mask = mask, .sq = 9, .sk = 17, .left = 3, .right = 0});
    }
    for (int mask : {TE_FL_MASK_TYPE_PADDING, TE_FL_MASK_TYPE_PADDING_CAUSAL, TE_FL_MASK_TYPE_PADDING_CAUSAL_BOTTOM_RIGHT}) {
      all.push_back({.layout = layout, .mask = mask, .b = 3, .sq = 9, .sk = 11, .len_q = {9, 4, 0}, .len_k = {7, 11, 3}});
      all.push_back({.layout = layout, .mask = mask, .b = 2, .sq = 9, .sk = 9, .left = 2, .right = 1, .len_q = {9, 5}, .len_k = {9, 5}});
    }
  }
  for (const Dims& bh : {Dims{1, 1}, {2, 1}, {1, 4}, {2, 4}})
    for (int d : {TE_FL_U8, TE_FL_BOOL}) all.push_back({.mask = TE_FL_MASK_TYPE_ARBITRARY, .mask_bh = bh, .mask_dtype = d});
  all.push_back({.layout = kS, .mask = TE_FL_MASK_TYPE_ARBITRARY});
  for (const auto& [l, r] : std::vector<std::pair<int64_t, int64_t>>{{2, 2}, {0, 0}, {3, -1}, {-1, 3}, {4, 0}}) all.push_back({.sq = 11, .sk = 11, .left = l, .right = r});
  for (int mask = TE_FL_MASK_TYPE_NONE; mask <= TE_FL_MASK_TYPE_PADDING_CAUSAL_BOTTOM_RIGHT; ++mask) {
    all.push_back({.layout = kT, .mask = mask, .b = 3, .sq = 8, .sk = 9, .len_q = {8, 1, 3}, .len_k = {9, 5, 2}, .max_given = true});
    all.push_back({.layout = kT, .mask = mask, .b = 3, .sq = 8, .sk = 9, .len_q = {8, 0, 3}, .len_k = {9, 5, 4}, .gap_q = {2, 3, 1}, .gap_k = {1, 0, 4}});
  }
  all.push_back({.layout = kT, .mask = TE_FL_MASK_TYPE_PADDING_CAUSAL, .b = 2, .sq = 8, .sk = 8, .g = 2, .left = 3, .right = 0, .len_q = {8, 6}, .len_k = {8, 6}});
}

void add_terms(std::vector<Variant>& all) {
  for (const Dims& bh : {Dims{1, 1}, {2, 1}, {1, 4}, {2, 4}}) all.push_back({.bias = TE_FL_F32, .bias_bh = bh});
  all.push_back({.dtype = TE_FL_BF16, .mask = TE_FL_MASK_TYPE_CAUSAL, .bias = TE_FL_BF16, .bias_bh = {1, 4}});
  for (int alibi : {1, 2}) {
    all.push_back({.alibi = alibi});
    all.push_back({.mask = TE_FL_MASK_TYPE_CAUSAL_BOTTOM_RIGHT, .sq = 5, .sk = 12, .alibi = alibi});
  }
  for (int softmax : {TE_FL_SOFTMAX_TYPE_OFF_BY_ONE, TE_FL_SOFTMAX_TYPE_LEARNABLE}) {
    for (int layout : {kS, kB}) all.push_back({.layout = layout, .mask = TE_FL_MASK_TYPE_CAUSAL, .softmax = softmax});
    all.push_back({.layout = kT, .mask = TE_FL_MASK_TYPE_PADDING, .softmax = softmax, .b = 2, .sq = 7, .sk = 9, .len_q = {7, 3}, .len_k = {9, 2}});
    all.push_back({.dtype = TE_FL_BF16, .softmax = softmax, .g = 2});
  }
  for (int layout : {kS, kB}) all.push_back({.layout = layout, .dropout = 0.25f});
  all.push_back({.mask = TE_FL_MASK_TYPE_CAUSAL, .sq = 21, .sk = 21, .g = 2, .dropout = 0.1f, .bias = TE_FL_F32});
  all.push_back({.softmax = TE_FL_SOFTMAX_TYPE_LEARNABLE, .dropout = 0.25f});
  all.push_back({.layout = kT, .mask = TE_FL_MASK_TYPE_PADDING, .b = 2, .sq = 7, .sk = 9, .dropout = 0.25f, .len_q = {7, 3}, .len_k = {9, 2}});
  for (int layout : {kS, kB}) {
    for (int mask : {TE_FL_MASK_TYPE_NONE, TE_FL_MASK_TYPE_CAUSAL}) all.push_back({.dtype = kE4, .layout = layout, .mask = mask, .sq = 16, .sk = 16});
    all.push_back({.dtype = kE4, .out = TE_FL_BF16, .layout = layout, .sq = 16, .sk = 32, .g = 2});
  }
  all.push_back({.dtype = kE4, .layout = kT, .mask = TE_FL_MASK_TYPE_PADDING_CAUSAL, .b = 2, .sq = 8, .sk = 8, .len_q = {8, 5}, .len_k = {8, 5}});
}

// The answer must fit the dtype.
void enquire(Problem& p, int dtype, int layout, bool training) {
  const Spec spec = is_fp8(dtype) ? Spec(dtype, TE_FL_SCALING_TENSOR, true, false, TE_FL_QUANT_COMPUTE_SCALE) : Spec(dtype);
  const Dims shape = layout == kT ? Dims{8, 2, 16} : Dims{4, 2, 2, 16};
  p.quantised_in("q", spec, shape), p.quantised_in("k", spec, shape), p.quantised_in("v", spec, shape);
  Tensor* y = p.out("backend", TE_FL_I32, {1});
  p.set("layout", layout), p.set("is_training", training);
  if (layout == kT) p.set("mask_type", TE_FL_MASK_TYPE_PADDING);
  p.oracle([&p, dtype, y] {
    p.expect_custom(y, [dtype](const Tensor& t) -> std::string {
      const double got = t.get(0), served = is_fp8(dtype) ? 2 : 1;
      if (got == served || got == -1) return {};
      return "backend[0]: got " + std::to_string(static_cast<int64_t>(got)) + ", expected -1 or " + std::to_string(static_cast<int>(served));
    });
  });
}

}  // namespace

void add_attention_cases(Table& table) {
  std::vector<Variant> all;
  add_shapes(all);
  add_masks(all);
  add_terms(all);
  for (const Variant& v : all) {
    add(table, "attention", "fused_attn_fwd", variant_name(v), [v](Problem& p) { forward(p, v); }, v.large);
    add(table, "attention", "fused_attn_bwd", variant_name(v), [v](Problem& p) { backward(p, v); }, v.large);
  }
  const Variant no_lse{.no_lse = true}, saved{.saved = true};
  for (const Variant& v : {no_lse, saved}) add(table, "attention", "fused_attn_fwd", variant_name(v), [v](Problem& p) { forward(p, v); });
  for (int dtype : std::initializer_list<int>{TE_FL_F32, TE_FL_F16, TE_FL_BF16, kE4})
    for (int layout : {kS, kB, kT})
      for (bool training : {false, true})
        add(table, "attention", "get_fused_attn_backend", std::string(name_of(dtype)) + "/" + (layout == kS ? "sbhd" : layout == kB ? "bshd" : "thd") + (training ? "/training" : ""),
            [=](Problem& p) { enquire(p, dtype, layout, training); });
}

}  // namespace te_fl::conformance
