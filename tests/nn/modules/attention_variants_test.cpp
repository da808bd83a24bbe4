// Variants of MultiheadAttention against the double-precision oracle: cross-attention, split or
// non-interleaved parameters, norms of q and k, RoPE with separate angles for the keys.
#include "oracle.hpp"
#include "support/expect.hpp"

namespace te_fl::nn::testing::attention_variants_test {
namespace {

constexpr int64_t kBatch = 2, kSq = 5, kSk = 4, kHidden = 12;

struct Case {
  std::string name;
  MultiheadAttentionOptions options = {};
  int64_t rotated = 0;
  bool own_angles = false;  // the keys' angles begin at position 3
};

std::vector<Case> cases() {
  const MultiheadAttentionOptions base{.hidden_size = kHidden,
                                       .num_attention_heads = 4,
                                       .num_gqa_groups = 2,
                                       .kv_channels = 6,
                                       .attention = {.mask_type = MaskType::kNone}};
  std::vector<Case> cases;
  const auto with = [&](const std::string& name, auto change) {
    Case c{.name = name, .options = base};
    change(c);
    cases.push_back(std::move(c));
  };
  const auto no_gqa = [](Case& c) { c.options.num_gqa_groups = 4; };
  with("split", [](Case& c) { c.options.fuse_qkv_params = false; });
  with("split_rope", [](Case& c) {
    c.options.fuse_qkv_params = false;
    c.options.attention.layout = Layout::kBSHD;
    c.rotated = 6;
  });
  with("split_all_heads", [&](Case& c) {
    no_gqa(c);
    c.options.fuse_qkv_params = false;
    c.options.input_layernorm = false;
  });
  with("not_interleaved", [](Case& c) { c.options.qkv_weight_interleaved = false; });
  with("not_interleaved_rope_partial", [](Case& c) {
    c.options.qkv_weight_interleaved = false;
    c.options.rotary_interleaved = true;
    c.rotated = 4;
  });
  with("keys_own_angles", [](Case& c) {
    c.rotated = 6;
    c.own_angles = true;
  });
  with("split_keys_own_angles", [](Case& c) {
    c.options.fuse_qkv_params = false;
    c.rotated = 6;
    c.own_angles = true;
  });
  with("qkv_bias_only", [](Case& c) {
    c.options.qkv_bias = true;
    c.options.proj_bias = false;
  });
  with("proj_bias_only", [](Case& c) {
    c.options.bias = false;
    c.options.proj_bias = true;
  });
  with("return_bias", [](Case& c) { c.options.return_bias = true; });
  for (const QkNorm norm : {QkNorm::kL2, QkNorm::kRMSNorm, QkNorm::kLayerNorm}) {
    const std::string kind = norm == QkNorm::kL2        ? "l2"
                             : norm == QkNorm::kRMSNorm ? "rmsnorm"
                                                        : "layernorm";
    with(kind + "_after_rope", [&](Case& c) {
      c.options.qk_norm = norm;
      c.rotated = 6;
    });
    with(kind + "_before_rope", [&](Case& c) {
      c.options.qk_norm = norm;
      c.options.qk_norm_before_rope = true;
      c.options.attention.layout = Layout::kBSHD;
      c.rotated = 4;
    });
    with(kind + "_alone", [&](Case& c) {
      c.options.qk_norm = norm;
      c.options.qk_norm_epsilon = 1e-2f;
    });
    with(kind + "_split_before_rope", [&](Case& c) {
      no_gqa(c);
      c.options.qk_norm = norm;
      c.options.fuse_qkv_params = false;
      c.options.qk_norm_before_rope = true;
      c.rotated = 6;
    });
  }
  const auto cross = [&](const std::string& name, auto change) {
    with("cross" + name, [&](Case& c) {
      c.options.attention_type = AttentionType::kCross;
      change(c);
    });
  };
  cross("", [](Case&) {});
  cross("_bshd_plain", [](Case& c) {
    c.options.attention.layout = Layout::kBSHD;
    c.options.input_layernorm = false;
    c.options.bias = false;
  });
  cross("_split", [](Case& c) { c.options.fuse_qkv_params = false; });
  cross("_split_plain", [](Case& c) {
    c.options.fuse_qkv_params = false;
    c.options.input_layernorm = false;
  });
  cross("_not_interleaved", [](Case& c) { c.options.qkv_weight_interleaved = false; });
  cross("_rope", [](Case& c) {
    c.rotated = 6;
    c.own_angles = true;
  });
  cross("_norms_rope", [](Case& c) {
    c.options.qk_norm = QkNorm::kRMSNorm;
    c.options.qk_norm_before_rope = true;
    c.options.fuse_qkv_params = false;
    c.options.attention.layout = Layout::kBSHD;
    c.rotated = 6;
  });
  cross("_causal_dropout", [](Case& c) {
    c.options.attention.mask_type = MaskType::kCausalBottomRight;
    c.options.attention.attention_dropout = 0.2f;
  });
  return cases;
}

oracle::MhaConfig make_oracle_config(const Case& c) {
  const MultiheadAttentionOptions& o = c.options;
  const bool cross = o.attention_type == AttentionType::kCross;
  oracle::MhaConfig config;
  config.hidden = o.hidden_size;
  config.attention =
      oracle::make_config({.num_attention_heads = o.num_attention_heads,
                           .head_dim = o.kv_channels,
                           .num_gqa_groups = o.num_gqa_groups,
                           .attention = {.mask_type = o.attention.mask_type,
                                         .attention_dropout = o.attention.attention_dropout}});
  const int64_t sk = cross ? kSk : kSq;
  config.attention.sequences = oracle::dense_sequences(o.attention.layout, kBatch, kSq, sk);
  config.attention.max_q = kSq;
  config.attention.max_kv = sk;
  config.epsilon = o.epsilon;
  config.input_norm = o.input_layernorm;
  config.rotated = c.rotated;
  config.interleaved = o.rotary_interleaved;
  config.cross = cross;
  config.split = !o.fuse_qkv_params;
  config.weights_interleaved = o.qkv_weight_interleaved;
  config.qk_norm = o.qk_norm;
  config.qk_epsilon = o.qk_norm_epsilon;
  config.qk_norm_first = o.qk_norm_before_rope;
  config.adds_bias = !o.return_bias;
  const auto positions = [&](int64_t length, int64_t first) {
    std::vector<int64_t> result;
    for (int64_t r = 0; r < kBatch * length; ++r) {
      result.push_back(first + (o.attention.layout == Layout::kSBHD ? r / kBatch : r % length));
    }
    return result;
  };
  config.positions = positions(kSq, 0);
  config.kv_positions = positions(sk, c.own_angles ? 3 : 0);
  return config;
}

class MhaVariant : public ::testing::TestWithParam<Case> {};

TEST_P(MhaVariant, MatchesFiniteDifferences) {
  const Case& c = GetParam();
  const MultiheadAttentionOptions& o = c.options;
  const bool cross = o.attention_type == AttentionType::kCross;
  auto module = take(MultiheadAttention::create(o));
  randomize(*module, 6, 0.5);
  Params in = params_of(*module);
  in["x"] = random_values(kBatch * kSq * kHidden, 1);
  if (cross) in["encoder"] = random_values(kBatch * kSk * kHidden, 2);
  const auto shaped = [&](const Values& v, int64_t s) {
    return o.attention.layout == Layout::kSBHD ? tensor({s, kBatch, kHidden}, v)
                                               : tensor({kBatch, s, kHidden}, v);
  };
  AttentionInputs inputs;
  if (cross) inputs.encoder_output = shaped(in["encoder"], kSk);
  if (c.rotated > 0) {
    const init::RotaryOptions rotary{
        .dim = c.rotated, .max_seqlen = 8, .interleaved = o.rotary_interleaved};
    inputs.rotary_angles = take(init::rotary_angles(rotary));
    if (c.own_angles) {
      init::RotaryOptions shifted = rotary;
      shifted.first_position = 3;
      inputs.rotary_angles_kv = take(init::rotary_angles(shifted));
    }
  }
  ContextScope scope{Context(11)};
  Ctx ctx;
  const Tensor y = take(module->forward(shaped(in["x"], kSq), &ctx, inputs));
  const Values w = random_values(kBatch * kSq * kHidden, 3);
  Tensor d_encoder;
  const Tensor dx =
      take(module->backward(shaped(w, kSq), ctx, nullptr, nullptr, nullptr, &d_encoder));
  std::map<std::string, Values> got{{"y", values_of(y)}, {"x", values_of(dx)}};
  if (cross) got["encoder"] = values_of(d_encoder);
  for (const NamedParameter& p : module->parameters()) {
    if (p.grad().defined()) got[p.name] = values_of(p.grad());
  }
  if (c.rotated == 0 && o.qk_norm == QkNorm::kNone) oracle::expect_no_gradient(got, "key_bias");
  if (c.rotated == 0 || !o.qk_norm_before_rope) oracle::expect_no_gradient(got, "k_norm.bias");
  EXPECT_EQ(got.count("proj.bias"), o.proj_bias.value_or(o.bias) && !o.return_bias ? 1u : 0u);
  const oracle::MhaConfig config = make_oracle_config(c);
  oracle::Function f = [&](const Params& p) {
    oracle::DropoutStream stream{.seed = 11};
    return oracle::mha(config, p, "", p.at("x"), {}, stream);
  };
  oracle::expect_matches(f, in, w, got, 1e-4);
}

INSTANTIATE_TEST_SUITE_P(All, MhaVariant, ::testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

std::vector<std::string> names(const MultiheadAttentionOptions& options) {
  std::vector<std::string> result;
  for (const NamedParameter& p : take(MultiheadAttention::create(options))->parameters()) {
    result.push_back(p.name);
  }
  return result;
}

// The names are those in checkpoints of Transformer Engine 2.20.2.
TEST(MhaNames, AreTransformerEngines) {
  MultiheadAttentionOptions options{.hidden_size = 12, .num_attention_heads = 3};
  options.fuse_qkv_params = false;
  options.qk_norm = QkNorm::kLayerNorm;
  EXPECT_EQ(names(options),
            (std::vector<std::string>{"q_norm.weight", "q_norm.bias", "k_norm.weight",
                                      "k_norm.bias", "layernorm_qkv.layer_norm_weight",
                                      "layernorm_qkv.layer_norm_bias", "layernorm_qkv.query_weight",
                                      "layernorm_qkv.key_weight", "layernorm_qkv.value_weight",
                                      "layernorm_qkv.query_bias", "layernorm_qkv.key_bias",
                                      "layernorm_qkv.value_bias", "proj.weight", "proj.bias"}));
  options.qk_norm = QkNorm::kL2;
  options.attention_type = AttentionType::kCross;
  options.bias = false;
  EXPECT_EQ(names(options), (std::vector<std::string>{
                                "layernorm_query.layer_norm_weight",
                                "layernorm_query.layer_norm_bias", "layernorm_query.query_weight",
                                "key_value.key_weight", "key_value.value_weight", "proj.weight"}));
  options.input_layernorm = false;
  EXPECT_EQ(names(options), (std::vector<std::string>{"query_layer.weight", "key_value.key_weight",
                                                      "key_value.value_weight", "proj.weight"}));
}

// A packed batch of cross-attention gives the same results as each sequence on its own.
TEST(MhaThd, CrossAttentionEqualsEachSequenceAlone) {
  const std::vector<int64_t> lengths_q = {3, 2}, lengths_kv = {2, 4};
  MultiheadAttentionOptions options{
      .hidden_size = 16,
      .num_attention_heads = 4,
      .num_gqa_groups = 2,
      .attention = {.layout = Layout::kTHD, .mask_type = MaskType::kPadding},
      .attention_type = AttentionType::kCross,
      .fuse_qkv_params = false,
      .qk_norm = QkNorm::kRMSNorm};
  auto packed = take(MultiheadAttention::create(options));
  options.attention.layout = Layout::kSBHD;
  options.attention.mask_type = MaskType::kNone;
  auto dense = take(MultiheadAttention::create(options));
  randomize(*packed, 8, 0.3);
  randomize(*dense, 8, 0.3);
  const Values x = random_values(5 * 16, 1), encoder = random_values(6 * 16, 2),
               w = random_values(5 * 16, 3);
  AttentionInputs inputs;
  inputs.rotary_angles = take(init::rotary_angles({.dim = 4, .max_seqlen = 8}));
  AttentionInputs thd = inputs;
  thd.encoder_output = tensor({6, 16}, encoder);
  thd.cu_seqlens_q = cu_seqlens(lengths_q);
  thd.cu_seqlens_kv = cu_seqlens(lengths_kv);
  thd.max_seqlen_q = 3;
  thd.max_seqlen_kv = 4;
  Ctx ctx;
  Tensor d_encoder;
  const Values y = values_of(take(packed->forward(tensor({5, 16}, x), &ctx, thd)));
  const Values dx = values_of(
      take(packed->backward(tensor({5, 16}, w), ctx, nullptr, nullptr, nullptr, &d_encoder)));
  int64_t q = 0, kv = 0;
  for (size_t s = 0; s < 2; ++s) {
    const int64_t nq = lengths_q[s], nkv = lengths_kv[s];
    const auto part = [](const Values& v, int64_t begin, int64_t rows) {
      return Values(v.begin() + begin * 16, v.begin() + (begin + rows) * 16);
    };
    inputs.encoder_output = tensor({nkv, 1, 16}, part(encoder, kv, nkv));
    Tensor want_encoder;
    const Values want =
        values_of(take(dense->forward(tensor({nq, 1, 16}, part(x, q, nq)), &ctx, inputs)));
    const Values want_dx = values_of(take(dense->backward(
        tensor({nq, 1, 16}, part(w, q, nq)), ctx, nullptr, nullptr, nullptr, &want_encoder)));
    EXPECT_LT(relative_l2(part(y, q, nq), want), 1e-5);
    EXPECT_LT(relative_l2(part(dx, q, nq), want_dx), 1e-5);
    EXPECT_LT(relative_l2(part(values_of(d_encoder), kv, nkv), values_of(want_encoder)), 1e-5);
    q += nq, kv += nkv;
  }
  const auto a = packed->parameters(), b = dense->parameters();
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_LT(relative_l2(values_of(a[i].grad()), values_of(b[i].grad())), 1e-5) << a[i].name;
  }
}

// Under FP8 attention, q, k and v heads that are views of a projection's output are passed as FP8
// data; all others are quantised from high precision. Both give results near those without FP8.
TEST(MhaFp8, EveryVariantFollowsHighPrecision) {
  constexpr int64_t kRows = 16, kWide = 64;
  for (const bool cross : {false, true}) {
    for (const bool split : {false, true}) {
      for (const bool rotated : {false, true}) {
        SCOPED_TRACE(::testing::Message() << cross << split << rotated);
        auto module = take(MultiheadAttention::create(
            {.hidden_size = kWide,
             .num_attention_heads = 4,
             .num_gqa_groups = 2,
             .attention = {.mask_type = MaskType::kNone},
             .attention_type = cross ? AttentionType::kCross : AttentionType::kSelf,
             .fuse_qkv_params = !split}));
        randomize(*module, 6, 0.2);
        const Tensor x = tensor({kRows, 1, kWide}, random_values(kRows * kWide, 1));
        const Tensor dy = tensor({kRows, 1, kWide}, random_values(kRows * kWide, 2));
        AttentionInputs inputs;
        if (cross) {
          inputs.encoder_output =
              tensor({2 * kRows, 1, kWide}, random_values(2 * kRows * kWide, 3));
        }
        if (rotated) {
          inputs.rotary_angles = take(init::rotary_angles({.dim = 16, .max_seqlen = 2 * kRows}));
        }
        const auto run = [&](bool fp8) {
          Values y, dx;
          for (int i = 0; i < 3; ++i) {  // three steps, until the scales fit the values
            Ctx ctx;
            {
              autocast scope(fp8, DelayedScaling{.amax_history_len = 1, .fp8_dpa = true});
              y = values_of(take(module->forward(x, &ctx, inputs)));
            }
            dx = values_of(take(module->backward(dy, ctx)));
            check(backward_end());
          }
          return std::pair(y, dx);
        };
        const auto exact = run(false), coded = run(true);
        EXPECT_GT(relative_l2(coded.first, exact.first), 1e-4);
        EXPECT_LT(relative_l2(coded.first, exact.first), 0.1);
        EXPECT_LT(relative_l2(coded.second, exact.second), 0.2);
      }
    }
  }
}

TEST(MhaVariantRules, WhatDoesNotFitIsNamed) {
  auto self = take(MultiheadAttention::create(
      {.hidden_size = 12, .num_attention_heads = 3, .input_layernorm = false}));
  auto cross = take(MultiheadAttention::create({.hidden_size = 12,
                                                .num_attention_heads = 3,
                                                .attention = {.mask_type = MaskType::kPadding},
                                                .attention_type = AttentionType::kCross}));
  const Tensor x = tensor({3, 1, 12}, random_values(36, 1));
  AttentionInputs inputs;
  EXPECT_FAILS(cross->forward(x, nullptr).status(), kInvalidArgument,
               "encoder_output is undefined");
  inputs.encoder_output = x;
  EXPECT_FAILS(self->forward(x, nullptr, inputs).status(), kInvalidArgument,
               "encoder_output is given to self-attention");
  Tensor normed;
  EXPECT_FAILS(self->forward(x, nullptr, {}, {}, nullptr, &normed).status(), kInvalidArgument,
               "input_layernorm");
  inputs.cu_seqlens_q = cu_seqlens({3});
  EXPECT_FAILS(cross->forward(x, nullptr, inputs).status(), kInvalidArgument, "cu_seqlens_kv");
  inputs.cu_seqlens_q = Tensor();
  inputs.rotary_angles = take(init::rotary_angles({.dim = 4, .max_seqlen = 8}));
  inputs.rotary_start_positions = int_tensor({0});
  EXPECT_FAILS(cross->forward(x, nullptr, inputs).status(), kInvalidArgument,
               "rotary_start_positions");
  inputs = {};
  inputs.rotary_angles_kv = take(init::rotary_angles({.dim = 4, .max_seqlen = 8}));
  EXPECT_FAILS(self->forward(x, nullptr, inputs).status(), kInvalidArgument,
               "rotary_angles_kv is given without rotary_angles");
  inputs.rotary_angles = inputs.rotary_angles_kv;
  inputs.rotary_angles_kv = take(init::rotary_angles({.dim = 4, .max_seqlen = 2}));
  EXPECT_FAILS(self->forward(x, nullptr, inputs).status(), kInvalidArgument,
               "rotary_angles_kv is f32[2,1,1,4]");
}

}  // namespace
}  // namespace te_fl::nn::testing::attention_variants_test
