#include "conformance/huge/attention.hpp"
#include "conformance/attention_case.hpp"
#include "conformance/case_file.hpp"
#include "conformance/compare.hpp"
#include "conformance/oracle_quantize.hpp"
#include "te_fl/ops/attention.h"

namespace te_fl::conformance {
namespace {

using namespace attention;  // NOLINT: this file has the attention cases

Spec output_spec(const Variant& v, int fp8) {
  if (!is_fp8(v.dtype)) return Spec(v.out >= 0 ? v.out : v.dtype);
  if (v.out >= 0) return Spec(v.out);
  Spec s(fp8, TE_FL_SCALING_TENSOR, true, v.columns, v.current ? TE_FL_QUANT_COMPUTE_SCALE : 0);
  s.scale = fp8 == kE4 ? 64.0f : 512.0f;
  return s;
}

// A tensor without data: only scale, scale_inv and amax.
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

void expect_output(Problem& p, Tensor* t, std::vector<double> want, std::vector<double> tolerance,
                   std::vector<uint8_t> skip) {
  const bool has_scale = t->spec.quantised() && !t->spec.current() && !t->spec.col;
  Expectation& e = has_scale ? p.expect_dequantised(t, std::move(want), std::move(tolerance))
                             : p.expect(t, std::move(want), std::move(tolerance));
  e.skip = std::move(skip);
}

}  // namespace

void attention::forward(Problem& p, const Variant& v) {
  const Inputs in = make_inputs(p, v);
  Tensor* o = p.out("o", output_spec(v, kE4), in.o_shape);
  Tensor* lse = v.no_lse ? nullptr : p.out("softmax_lse", TE_FL_F32, in.lse_shape);
  Tensor* s = v.rounds() ? quant_only(p, "s_quant", kE4, v.scale_p, Role::kInOut) : nullptr;
  if (v.saved) p.saved_storage = 0;
  p.oracle([&p, v, in, o, lse, s] {
    Forward r = attend(v, in);
    expect_output(p, o, r.o, r.tolerance, r.skip_o);
    if (lse != nullptr) p.expect(lse, r.lse, r.lse_tolerance).skip = r.skip_lse;
    if (s != nullptr) p.expect_dequantised(s, {r.p_max});
  });
}

void attention::backward(Problem& p, const Variant& v) {
  const Inputs in = make_inputs(p, v);
  const bool fp8 = is_fp8(v.dtype);
  const Forward f = attend(v, in);
  const Spec grad_in =
      fp8 ? Spec(kE5, TE_FL_SCALING_TENSOR, true, false, TE_FL_QUANT_COMPUTE_SCALE) : Spec(v.dtype);
  const Spec o_in =
      fp8 ? Spec(kE4, TE_FL_SCALING_TENSOR, true, false, TE_FL_QUANT_COMPUTE_SCALE) : Spec(v.dtype);
  Tensor* d_o = p.quantised_in("d_o", grad_in, in.o_shape);
  Tensor* o = p.quantised_in("o", o_in, in.o_shape, [f](Random&, int64_t i) { return f.o[i]; });
  Tensor* lse =
      p.in("softmax_lse", TE_FL_F32, in.lse_shape, [f](Random&, int64_t i) { return f.lse[i]; });
  Tensor* grads[3];
  if (v.packed) {
    const char* const names[3] = {"dq", "dk", "dv"};
    Inputs copy = in;
    const Spec spec = output_spec(v, kE5);
    const auto bits = static_cast<int64_t>(in.q->data->size()) * 8;
    packed_inputs(p, spec, v, copy, names, Role::kOut,
                  make_poisoned(spec.dtype, bits / storage_bits(spec.dtype)), grads);
  } else {
    grads[0] = p.out("dq", output_spec(v, kE5), in.q_shape),
    grads[1] = p.out("dk", output_spec(v, kE5), in.k_shape),
    grads[2] = p.out("dv", output_spec(v, kE5), in.v_shape);
  }
  Tensor* dbias = in.bias == nullptr ? nullptr : p.out("dbias", v.bias, in.bias->shape);
  Tensor* dsink = in.sink == nullptr ? nullptr : p.out("dsink", TE_FL_F32, {v.h});
  if (v.rounds()) quant_only(p, "s_quant", kE4, v.scale_p, Role::kIn);
  if (v.saved) p.saved_storage = 0;
  Tensor* dp = v.rounds() ? quant_only(p, "dp_quant", kE5, kScaleDs, Role::kInOut) : nullptr;
  p.oracle([&p, v, in, d_o, o, lse, dq = grads[0], dk = grads[1], dv = grads[2], dbias, dsink, dp] {
    Gradients r = differentiate(v, in, {dequantised(*d_o), dequantised(*o), lse->values()});
    expect_output(p, dq, r.dq, r.dq_tolerance, r.skip_q);
    expect_output(p, dk, r.dk, r.dk_tolerance, r.skip_k);
    expect_output(p, dv, r.dv, r.dv_tolerance, r.skip_v);
    if (dbias != nullptr) p.expect(dbias, r.dbias, r.dbias_tolerance);
    if (dsink != nullptr) p.expect(dsink, r.dsink, r.dsink_tolerance);
    if (dp != nullptr) p.expect_dequantised(dp, {r.ds_max}, {0.1 * r.ds_max});
  });
}

namespace {

void add_shapes(std::vector<Variant>& all) {
  for (int dtype : {TE_FL_F32, TE_FL_F16, TE_FL_BF16}) {
    for (int layout : {kS, kB}) all.push_back({.dtype = dtype, .layout = layout});
    all.push_back({.dtype = dtype,
                   .layout = kT,
                   .b = 3,
                   .sq = 7,
                   .sk = 9,
                   .len_q = {5, 7, 2},
                   .len_k = {9, 4, 6}});
  }
  all.push_back({.dtype = TE_FL_BF16, .out = TE_FL_F32});
  for (int layout : {kS, kB}) {
    all.push_back({.layout = layout, .b = 1, .sq = 1, .sk = 1, .h = 1, .g = 1, .d = 1, .dv = 1});
    all.push_back({.layout = layout,
                   .b = 1,
                   .sq = 1,
                   .sk = 131,
                   .h = 3,
                   .g = 1,
                   .d = 20,
                   .dv = 20});  // one query, as in decoding
    all.push_back(
        {.layout = layout, .b = 3, .sq = 13, .sk = 17, .h = 6, .g = 2, .d = 18, .dv = 10});
    all.push_back({.layout = layout, .b = 0});
    all.push_back({.layout = layout, .sq = 0});
    all.push_back({.layout = layout, .sk = 0});  // no keys: all rows are masked
    all.push_back({.layout = layout, .sq = 9, .sk = 9, .packed = true});
  }
  all.push_back({.b = 1, .sq = 67, .sk = 131, .h = 2, .g = 2, .d = 64, .dv = 64});
  all.push_back({.dtype = TE_FL_BF16,
                 .layout = kS,
                 .mask = TE_FL_MASK_TYPE_CAUSAL,
                 .b = 1,
                 .sq = 257,
                 .sk = 257,
                 .h = 4,
                 .g = 2,
                 .d = 64,
                 .dv = 64,
                 .large = true});
  all.push_back({.dtype = TE_FL_BF16,
                 .layout = kT,
                 .b = 2,
                 .sq = 6,
                 .sk = 6,
                 .len_q = {6, 3},
                 .len_k = {6, 3},
                 .packed = true});
  all.push_back({.scale = -0.5});
}

// Adds cases that vendors' fused kernels support: half precision, multiples of the vector width,
// all masks.
void add_half(std::vector<Variant>& all) {
  constexpr int kBF = TE_FL_BF16;
  for (int layout : {kS, kB}) {
    for (int mask :
         {TE_FL_MASK_TYPE_NONE, TE_FL_MASK_TYPE_CAUSAL, TE_FL_MASK_TYPE_CAUSAL_BOTTOM_RIGHT}) {
      all.push_back(
          {.dtype = kBF, .layout = layout, .mask = mask, .sq = 64, .sk = 64, .d = 128, .dv = 128});
      all.push_back({.dtype = kBF,
                     .layout = layout,
                     .mask = mask,
                     .sq = 33,
                     .sk = 70,
                     .g = 2,
                     .d = 64,
                     .dv = 64});
      all.push_back({.dtype = kBF,
                     .layout = layout,
                     .mask = mask,
                     .sq = 70,
                     .sk = 70,
                     .d = 64,
                     .dv = 64,
                     .left = 9,
                     .right = 5});
    }
    all.push_back({.dtype = kBF, .layout = layout, .sq = 70, .sk = 70, .left = 0});
    all.push_back({.dtype = kBF, .layout = layout, .sq = 70, .sk = 70, .right = 3});
    all.push_back({.dtype = kBF, .layout = layout, .sq = 70, .sk = 150, .left = 9, .right = 3});
    all.push_back({.dtype = kBF,
                   .layout = layout,
                   .mask = TE_FL_MASK_TYPE_CAUSAL,
                   .sq = 40,
                   .sk = 40,
                   .d = 64,
                   .dv = 64,
                   .packed = true});
    for (int mask : {TE_FL_MASK_TYPE_PADDING, TE_FL_MASK_TYPE_PADDING_CAUSAL,
                     TE_FL_MASK_TYPE_PADDING_CAUSAL_BOTTOM_RIGHT}) {
      all.push_back({.dtype = kBF,
                     .layout = layout,
                     .mask = mask,
                     .b = 4,
                     .sq = 40,
                     .sk = 72,
                     .g = 2,
                     .d = 64,
                     .dv = 64,
                     .len_q = {40, 17, 0, 5},
                     .len_k = {20, 72, 9, 0}});
      all.push_back({.dtype = kBF,
                     .layout = layout,
                     .mask = mask,
                     .b = 2,
                     .sq = 140,
                     .sk = 140,
                     .left = 12,
                     .right = 3,
                     .len_q = {140, 131},
                     .len_k = {140, 131}});
    }
  }
  for (int mask = TE_FL_MASK_TYPE_NONE; mask <= TE_FL_MASK_TYPE_PADDING_CAUSAL_BOTTOM_RIGHT;
       ++mask) {
    all.push_back({.dtype = kBF,
                   .layout = kT,
                   .mask = mask,
                   .b = 4,
                   .sq = 70,
                   .sk = 80,
                   .g = 2,
                   .d = 64,
                   .dv = 64,
                   .len_q = {70, 1, 33, 0},
                   .len_k = {80, 33, 20, 6},
                   .max_given = true});
    all.push_back({.dtype = kBF,
                   .layout = kT,
                   .mask = mask,
                   .b = 3,
                   .sq = 40,
                   .sk = 40,
                   .len_q = {40, 7, 0},
                   .len_k = {40, 21, 9},
                   .gap_q = {2, 3, 1},
                   .gap_k = {1, 0, 4},
                   .max_given = true});
  }
  all.push_back({.dtype = kBF,
                 .layout = kT,
                 .mask = TE_FL_MASK_TYPE_PADDING_CAUSAL,
                 .b = 2,
                 .sq = 40,
                 .sk = 40,
                 .d = 64,
                 .dv = 64,
                 .len_q = {40, 23},
                 .len_k = {40, 23},
                 .packed = true,
                 .max_given = true});
  for (const auto& [d, dv] :
       std::vector<std::pair<int64_t, int64_t>>{{8, 8}, {24, 40}, {96, 96}, {192, 128}, {256, 256}})
    all.push_back({.dtype = kBF,
                   .mask = TE_FL_MASK_TYPE_CAUSAL,
                   .b = 1,
                   .sq = 40,
                   .sk = 40,
                   .h = 2,
                   .g = 2,
                   .d = d,
                   .dv = dv,
                   .scale = 0.125});
  all.push_back({.dtype = kBF, .sq = 1, .sk = 131, .d = 64, .dv = 64});
  all.push_back({.dtype = kBF, .b = 1, .sq = 1, .sk = 1, .h = 1, .g = 1});
  all.push_back({.dtype = kBF,
                 .b = 1,
                 .sq = 300,
                 .sk = 520,
                 .h = 2,
                 .g = 1,
                 .d = 128,
                 .dv = 128,
                 .large = true});
  all.push_back({.dtype = kBF, .scale = -0.5});
  for (int mask : {TE_FL_MASK_TYPE_CAUSAL, TE_FL_MASK_TYPE_CAUSAL_BOTTOM_RIGHT})
    all.push_back(
        {.dtype = TE_FL_F16, .mask = mask, .sq = 50, .sk = 130, .g = 1, .d = 64, .dv = 64});
}

void add_masks(std::vector<Variant>& all) {
  for (int layout : {kS, kB}) {
    for (int mask : {TE_FL_MASK_TYPE_CAUSAL, TE_FL_MASK_TYPE_CAUSAL_BOTTOM_RIGHT}) {
      all.push_back({.layout = layout, .mask = mask, .sq = 13, .sk = 13});
      all.push_back({.layout = layout, .mask = mask, .sq = 5, .sk = 13});
      all.push_back({.layout = layout,
                     .mask = mask,
                     .sq = 13,
                     .sk = 5});  // bottom-right: the first queries see no keys
      all.push_back({.layout = layout, .mask = mask, .sq = 9, .sk = 17, .left = 3, .right = 0});
    }
    for (int mask : {TE_FL_MASK_TYPE_PADDING, TE_FL_MASK_TYPE_PADDING_CAUSAL,
                     TE_FL_MASK_TYPE_PADDING_CAUSAL_BOTTOM_RIGHT}) {
      all.push_back({.layout = layout,
                     .mask = mask,
                     .b = 3,
                     .sq = 9,
                     .sk = 11,
                     .len_q = {9, 4, 0},
                     .len_k = {7, 11, 3}});
      all.push_back({.layout = layout,
                     .mask = mask,
                     .b = 2,
                     .sq = 9,
                     .sk = 9,
                     .left = 2,
                     .right = 1,
                     .len_q = {9, 5},
                     .len_k = {9, 5}});
    }
  }
  for (const Dims& bh : {Dims{1, 1}, {2, 1}, {1, 4}, {2, 4}})
    for (int d : {TE_FL_U8, TE_FL_BOOL})
      all.push_back({.mask = TE_FL_MASK_TYPE_ARBITRARY, .mask_bh = bh, .mask_dtype = d});
  all.push_back({.layout = kS, .mask = TE_FL_MASK_TYPE_ARBITRARY});
  for (const auto& [l, r] :
       std::vector<std::pair<int64_t, int64_t>>{{2, 2}, {0, 0}, {3, -1}, {-1, 3}, {4, 0}})
    all.push_back({.sq = 11, .sk = 11, .left = l, .right = r});
  for (const Dims& lengths : {Dims{9, 17}, {17, 9}}) {  // the window is aligned at the bottom right
    all.push_back({.sq = lengths[0], .sk = lengths[1], .left = 3, .right = 2});
    all.push_back({.sq = lengths[0], .sk = lengths[1], .right = 2});
    all.push_back({.layout = kS,
                   .mask = TE_FL_MASK_TYPE_ARBITRARY,
                   .sq = lengths[0],
                   .sk = lengths[1],
                   .left = 4,
                   .right = 1});
    all.push_back({.mask = TE_FL_MASK_TYPE_PADDING,
                   .b = 2,
                   .sq = lengths[0],
                   .sk = lengths[1],
                   .left = 2,
                   .right = 1,
                   .len_q = {9, 3},
                   .len_k = {4, 8}});
  }
  for (int mask = TE_FL_MASK_TYPE_NONE; mask <= TE_FL_MASK_TYPE_PADDING_CAUSAL_BOTTOM_RIGHT;
       ++mask) {
    all.push_back({.layout = kT,
                   .mask = mask,
                   .b = 3,
                   .sq = 8,
                   .sk = 9,
                   .len_q = {8, 1, 3},
                   .len_k = {9, 5, 2},
                   .max_given = true});
    all.push_back({.layout = kT,
                   .mask = mask,
                   .b = 3,
                   .sq = 8,
                   .sk = 9,
                   .len_q = {8, 0, 3},
                   .len_k = {9, 5, 4},
                   .gap_q = {2, 3, 1},
                   .gap_k = {1, 0, 4}});
  }
  all.push_back({.layout = kT,
                 .mask = TE_FL_MASK_TYPE_PADDING_CAUSAL,
                 .b = 2,
                 .sq = 8,
                 .sk = 8,
                 .g = 2,
                 .left = 3,
                 .right = 0,
                 .len_q = {8, 6},
                 .len_k = {8, 6}});
}

void add_terms(std::vector<Variant>& all) {
  for (const Dims& bh : {Dims{1, 1}, {2, 1}, {1, 4}, {2, 4}})
    all.push_back({.bias = TE_FL_F32, .bias_bh = bh});
  all.push_back(
      {.dtype = TE_FL_BF16, .mask = TE_FL_MASK_TYPE_CAUSAL, .bias = TE_FL_BF16, .bias_bh = {1, 4}});
  all.push_back({.dtype = TE_FL_F16, .bias = TE_FL_F16});
  all.push_back({.saved = true});
  for (int alibi : {1, 2}) {
    all.push_back({.alibi = alibi});
    all.push_back({.mask = TE_FL_MASK_TYPE_CAUSAL_BOTTOM_RIGHT, .sq = 5, .sk = 12, .alibi = alibi});
  }
  for (int softmax : {TE_FL_SOFTMAX_TYPE_OFF_BY_ONE, TE_FL_SOFTMAX_TYPE_LEARNABLE}) {
    for (int layout : {kS, kB})
      all.push_back({.layout = layout, .mask = TE_FL_MASK_TYPE_CAUSAL, .softmax = softmax});
    all.push_back({.layout = kT,
                   .mask = TE_FL_MASK_TYPE_PADDING,
                   .softmax = softmax,
                   .b = 2,
                   .sq = 7,
                   .sk = 9,
                   .len_q = {7, 3},
                   .len_k = {9, 2}});
    all.push_back({.dtype = TE_FL_BF16, .softmax = softmax, .g = 2});
  }
  for (int layout : {kS, kB}) all.push_back({.layout = layout, .dropout = 0.25f});
  all.push_back({.dtype = TE_FL_BF16, .dropout = 0.25f});
  // Repeats earlier calls with another RNG seed and offset, since a cached plan must not store
  // these; also with both in memory.
  for (const bool in_memory : {false, true})
    for (const int dtype : {TE_FL_F32, TE_FL_BF16})
      all.push_back({.dtype = dtype,
                     .dropout = 0.25f,
                     .rng_seed = kOtherSeed,
                     .rng_offset = (uint64_t{1} << 33) + 11,
                     .rng_in_memory = in_memory});
  all.push_back({.mask = TE_FL_MASK_TYPE_CAUSAL,
                 .sq = 21,
                 .sk = 21,
                 .g = 2,
                 .dropout = 0.1f,
                 .bias = TE_FL_F32});
  all.push_back({.softmax = TE_FL_SOFTMAX_TYPE_LEARNABLE, .dropout = 0.25f});
  all.push_back({.layout = kT,
                 .mask = TE_FL_MASK_TYPE_PADDING,
                 .b = 2,
                 .sq = 7,
                 .sk = 9,
                 .dropout = 0.25f,
                 .len_q = {7, 3},
                 .len_k = {9, 2}});
  for (int layout : {kS, kB}) {
    for (int mask : {TE_FL_MASK_TYPE_NONE, TE_FL_MASK_TYPE_CAUSAL})
      all.push_back({.dtype = kE4, .layout = layout, .mask = mask, .sq = 16, .sk = 16});
    all.push_back({.dtype = kE4, .out = TE_FL_BF16, .layout = layout, .sq = 16, .sk = 32, .g = 2});
  }
  add_fp8_variants(all);
  all.push_back({.dtype = kE4,
                 .layout = kT,
                 .mask = TE_FL_MASK_TYPE_PADDING_CAUSAL,
                 .b = 2,
                 .sq = 8,
                 .sk = 8,
                 .len_q = {8, 5},
                 .len_k = {8, 5}});
}

// A case of get_fused_attn_backend. Expects -1 or the backend number for the dtype.
void enquire(Problem& p, int dtype, int layout, bool training, int mask, int softmax,
             double dropout, double window) {
  const Spec spec = is_fp8(dtype)
                        ? Spec(dtype, TE_FL_SCALING_TENSOR, true, false, TE_FL_QUANT_COMPUTE_SCALE)
                        : Spec(dtype);
  const Dims shape = layout == kT ? Dims{8, 2, 16} : Dims{4, 2, 2, 16};
  p.quantised_in("q", spec, shape), p.quantised_in("k", spec, shape),
      p.quantised_in("v", spec, shape);
  Tensor* y = p.out("backend", TE_FL_I32, {1});
  p.set("layout", layout), p.set("is_training", training);
  p.set("mask_type", mask), p.set("softmax_type", softmax), p.set("dropout_p", dropout);
  p.set("window_left", window), p.set("window_right", window);
  p.oracle([&p, dtype, y] {
    p.expect_custom(y, [dtype](const Tensor& t) -> std::string {
      const double got = t.get(0), served = is_fp8(dtype) ? 2 : 1;
      if (got == served || got == -1) return {};
      return "backend[0]: got " + std::to_string(static_cast<int64_t>(got)) + ", expected -1 or " +
             std::to_string(static_cast<int>(served));
    });
  });
}

// Invalid calls that the schema's shape rules cannot detect. They must be refused without writing
// anything.
void add_mistakes(Table& table) {
  auto wrong = [&](const char* name, const Variant& v, std::function<void(Problem&)> spoil) {
    add(table, "attention", "fused_attn_fwd", std::string("mistake/") + name, [=](Problem& p) {
      forward(p, v);
      p.oracles.clear();
      spoil(p);
      p.expect_error(-1, "");
      for (const auto& t : p.tensors)
        if (t->role != Role::kIn) p.expect_unchanged(t.get());
    });
  };
  const Variant thd{.layout = kT, .b = 2, .sq = 5, .sk = 5, .len_q = {5, 3}, .len_k = {5, 3}};
  wrong("thd_without_lengths", thd, [](Problem& p) { p.singles.erase("cu_seqlens_q"); });
  wrong("padding_without_lengths", {},
        [](Problem& p) { p.set("mask_type", TE_FL_MASK_TYPE_PADDING); });
  wrong("arbitrary_without_mask", {},
        [](Problem& p) { p.set("mask_type", TE_FL_MASK_TYPE_ARBITRARY); });
  wrong("learnable_without_sink", {},
        [](Problem& p) { p.set("softmax_type", TE_FL_SOFTMAX_TYPE_LEARNABLE); });
  wrong("heads_not_a_multiple", {.h = 4, .g = 3}, [](Problem&) {});
  wrong("another_batch_of_keys", {}, [](Problem& p) { p.in("k", TE_FL_F32, {3, 9, 4, 16}); });
  wrong("another_head_size_of_keys", {}, [](Problem& p) { p.in("k", TE_FL_F32, {2, 9, 4, 8}); });
  wrong("another_length_of_values", {}, [](Problem& p) { p.in("v", TE_FL_F32, {2, 8, 4, 16}); });
  wrong("output_of_another_shape", {}, [](Problem& p) { p.out("o", TE_FL_F32, {2, 7, 4, 8}); });
  wrong("lse_of_another_shape", {}, [](Problem& p) { p.out("softmax_lse", TE_FL_F32, {2, 7, 4}); });
  wrong("softcap_below_zero", {}, [](Problem& p) { p.set("softcap", -1); });
  wrong("bias_of_another_shape", {}, [](Problem& p) { p.in("bias", TE_FL_F32, {1, 3, 7, 9}); });
}

void add_cases(Table& table) {
  std::vector<Variant> all;
  add_shapes(all);
  add_half(all);
  add_masks(all);
  add_terms(all);
  add_term_variants(all);
  for (const Variant& v : all) {
    add(
        table, "attention", "fused_attn_fwd", variant_name(v), [v](Problem& p) { forward(p, v); },
        v.large);
    add(
        table, "attention", "fused_attn_bwd", variant_name(v), [v](Problem& p) { backward(p, v); },
        v.large);
  }
  const Variant no_lse[] = {{.no_lse = true},
                            {.dtype = TE_FL_BF16, .no_lse = true},
                            {.dtype = TE_FL_BF16,
                             .b = 1,
                             .sq = 520,
                             .sk = 520,
                             .h = 2,
                             .g = 1,
                             .d = 128,
                             .dv = 128,
                             .no_lse = true,
                             .large = true}};
  for (const Variant& v : no_lse) {
    add(
        table, "attention", "fused_attn_fwd", variant_name(v), [v](Problem& p) { forward(p, v); },
        v.large);
  }
  add_mistakes(table);
  for (int dtype : std::initializer_list<int>{TE_FL_F32, TE_FL_F16, TE_FL_BF16, kE4})
    for (int layout : {kS, kB, kT})
      for (bool training : {false, true})
        add(table, "attention", "get_fused_attn_backend",
            std::string(name_of(dtype)) + "/" +
                (layout == kS   ? "sbhd"
                 : layout == kB ? "bshd"
                                : "thd") +
                (training ? "/training" : ""),
            [=](Problem& p) {
              enquire(p, dtype, layout, training,
                      layout == kT ? TE_FL_MASK_TYPE_PADDING : TE_FL_MASK_TYPE_NONE, 0, 0, -1);
            });
  for (int mask = TE_FL_MASK_TYPE_NONE; mask <= TE_FL_MASK_TYPE_ARBITRARY; ++mask)
    for (int softmax = TE_FL_SOFTMAX_TYPE_VANILLA; softmax <= TE_FL_SOFTMAX_TYPE_LEARNABLE;
         ++softmax)
      add(table, "attention", "get_fused_attn_backend",
          "bf16/bshd/mask=" + std::to_string(mask) + "/softmax=" + std::to_string(softmax) +
              "/dropout/window",
          [=](Problem& p) { enquire(p, TE_FL_BF16, kB, true, mask, softmax, 0.1, 4); });
}

}  // namespace
}  // namespace te_fl::conformance

namespace te_fl::huge {
namespace {

void add_cases(Cases& cases) {
  using namespace attention_calls;
  const auto add = [&](const char* what, const Problem& p) {
    cases.push_back({"fused_attn_fwd", what, [=](Run& r) { Attention(r, p).forward(r); }});
    cases.push_back({"fused_attn_bwd", what, [=](Run& r) { Attention(r, p).backward(r); }});
  };
  add("bshd, causal", {.mask = TE_FL_MASK_TYPE_CAUSAL});
  add("sbhd, padding", {.layout = TE_FL_LAYOUT_SBHD, .mask = TE_FL_MASK_TYPE_PADDING});
  const Problem thd{.layout = TE_FL_LAYOUT_THD, .mask = TE_FL_MASK_TYPE_PADDING};
  cases.push_back({"fused_attn_fwd", "thd", [=](Run& r) { Attention(r, thd).forward(r); }});
  add("grouped, plain kernels", {.mask = TE_FL_MASK_TYPE_CAUSAL, .groups = 4, .plain = true});
  // Few sequences, since the plain kernels launch (tokens x sequences) blocks.
  add("thd, plain kernels", {.layout = TE_FL_LAYOUT_THD,
                             .mask = TE_FL_MASK_TYPE_PADDING,
                             .dim = 256,
                             .length = 512,
                             .plain = true});
  add("bias, dropout", {.layout = TE_FL_LAYOUT_SBHD, .dim = 32, .bias = true, .dropout = 0.25f});
  cases.push_back({"fused_attn_fwd", "FP8", [](Run& r) { forward_of_codes(r, false); }});
  cases.push_back(
      {"fused_attn_fwd", "FP8, plain kernels", [](Run& r) { forward_of_codes(r, true); }});
  cases.push_back({"get_fused_attn_backend", "", enquiry});
}

}  // namespace
}  // namespace te_fl::huge

namespace te_fl::bench {
namespace {

void add_cases(Cases& cases) {
  const size_t first = cases.size();
  const auto sbhd = [](Case& c, int64_t s) {
    return Shape{s, c.extent(1), c.extent(2), c.extent(3)};
  };
  const auto lse = [](Case& c, int64_t s) { return Shape{c.extent(1), c.extent(2), s}; };
  // The floating-point operations of both GEMMs; a causal mask removes half of them.
  const auto flops = [](Case& c, int64_t s) {
    return 2.0 * 2.0 * static_cast<double>(c.extent(1) * c.extent(2) * s * s * c.extent(3)) / 2;
  };
  const auto common = [=](auto& a, Case& c, int64_t s, int dtype) {
    const Shape shape = sbhd(c, s);
    a.q = c.in(shape, dtype), a.k = c.in(shape, dtype), a.v = c.in(shape, dtype);
    a.o = c.in(shape, dtype), a.softmax_lse = c.in(lse(c, s), TE_FL_F32);
    a.mask_type = TE_FL_MASK_TYPE_CAUSAL, a.scale = 0.125f;
  };
  both_dtypes(cases, "fused_attn_fwd", [=](Case& c, int64_t s, int dtype) {
    common(c.args<te_fl_fused_attn_fwd_args>(), c, s, dtype);
    c.flops = flops(c, s);
  });
  both_dtypes(cases, "fused_attn_bwd", [=](Case& c, int64_t s, int dtype) {
    auto& a = c.args<te_fl_fused_attn_bwd_args>();
    common(a, c, s, dtype);
    const Shape shape = sbhd(c, s);
    a.d_o = c.in(shape, dtype), a.dq = c.out(shape, dtype);
    a.dk = c.out(shape, dtype), a.dv = c.out(shape, dtype);
    float* sums = static_cast<float*>(a.softmax_lse->dl.data);
    for (int64_t i = 0; i < c.extent(1) * c.extent(2) * s; ++i) sums[i] = 8.0f;
    c.flops = 2.5 * flops(c, s);
  });
  cases.push_back({"get_fused_attn_backend", "bf16",
                   [=](Case& c, int64_t s) {
                     auto& a = c.args<te_fl_get_fused_attn_backend_args>();
                     const Shape shape = sbhd(c, s);
                     a.q = c.in(shape, TE_FL_BF16), a.k = c.in(shape, TE_FL_BF16);
                     a.v = c.in(shape, TE_FL_BF16), a.backend = c.out({1}, TE_FL_I32);
                   },
                   false, 16});
  for (CaseSpec& spec : cases) {
    if (spec.op == "fused_attn_fwd" || spec.op == "fused_attn_bwd") {
      spec.memory_bound = false, spec.fixed_rows = 1024;
    }
  }
  describe(cases, first, "sequence, batch, heads, dim", {1024, 2, 8, 64}, {2048, 4, 32, 128});
}

}  // namespace
}  // namespace te_fl::bench

namespace te_fl::conformance {

extern const CaseFile attention_cases{.cases = add_cases,
                                      .drawn = attention::draw_cases,
                                      .huge = huge::add_cases,
                                      .bench = bench::add_cases};

}  // namespace te_fl::conformance
