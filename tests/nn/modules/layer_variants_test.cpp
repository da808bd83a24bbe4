// Variants of TransformerLayer against the double-precision oracle: decoders, residuals after the
// norm, an output norm, drop path, norms of q and k, split parameters.
#include "oracle.hpp"
#include "support/expect.hpp"

namespace te_fl::nn::testing::layer_variants_test {
namespace {

constexpr int64_t kBatch = 2, kSeq = 5, kEncoder = 4, kHidden = 12;

struct Case {
  std::string name;
  TransformerLayerOptions options = {};
};

std::vector<Case> cases() {
  const TransformerLayerOptions base{
      .hidden_size = kHidden, .ffn_hidden_size = 10, .num_attention_heads = 3};
  std::vector<Case> cases;
  const auto with = [&](const std::string& name, auto change) {
    Case c{.name = name, .options = base};
    change(c.options);
    cases.push_back(std::move(c));
  };
  with("decoder", [](auto& o) { o.layer_type = LayerType::kDecoder; });
  with("decoder_split_dropout_bshd", [](auto& o) {
    o.layer_type = LayerType::kDecoder;
    o.fuse_qkv_params = false;
    o.hidden_dropout = 0.2f;
    o.attention.attention_dropout = 0.1f;
    o.attention.layout = Layout::kBSHD;
  });
  with("decoder_post_norm_residual", [](auto& o) {
    o.layer_type = LayerType::kDecoder;
    o.apply_residual_connection_post_layernorm = true;
    o.enc_dec_mask_type = MaskType::kCausalBottomRight;
  });
  with("decoder_output_norm", [](auto& o) {
    o.layer_type = LayerType::kDecoder;
    o.output_layernorm = true;
    o.normalization = Normalization::kRMSNorm;
    o.zero_centered_gamma = true;
  });
  with("decoder_window", [](auto& o) {
    o.layer_type = LayerType::kDecoder;
    o.enc_dec_window_left = 1;
    o.enc_dec_window_right = 1;
  });
  with("decoder_softcap", [](auto& o) {
    o.layer_type = LayerType::kDecoder;
    o.attention.softcap = 0.25f;
  });
  with("post_norm_residual", [](auto& o) {
    o.apply_residual_connection_post_layernorm = true;
    o.hidden_dropout = 0.2f;
  });
  with("output_norm", [](auto& o) { o.output_layernorm = true; });
  with("bert", [](auto& o) {
    o.output_layernorm = true;
    o.apply_residual_connection_post_layernorm = true;
    o.attention.mask_type = MaskType::kNone;
  });
  with("drop_path", [](auto& o) { o.drop_path_rate = 0.4f; });
  with("drop_path_dropout_bshd", [](auto& o) {
    o.drop_path_rate = 0.2f;
    o.hidden_dropout = 0.3f;
    o.attention.layout = Layout::kBSHD;
    o.layer_type = LayerType::kDecoder;
  });
  with("drop_path_parallel", [](auto& o) {
    o.drop_path_rate = 0.4f;
    o.parallel_attention_mlp = true;
  });
  with("qk_norm_split_no_bias", [](auto& o) {
    o.qk_norm = QkNorm::kRMSNorm;
    o.fuse_qkv_params = false;
    o.bias = false;
    o.activation = Activation::kSwiglu;
  });
  with("qk_norm_l2_not_interleaved", [](auto& o) {
    o.qk_norm = QkNorm::kL2;
    o.qk_norm_epsilon = 1e-3f;
    o.qkv_weight_interleaved = false;
  });
  return cases;
}

oracle::MhaConfig make_attention_config(const TransformerLayerOptions& o, bool cross) {
  const int64_t sk = cross ? kEncoder : kSeq;
  oracle::MhaConfig c;
  c.hidden = o.hidden_size;
  c.attention = oracle::make_config(
      {.num_attention_heads = o.num_attention_heads,
       .head_dim = o.hidden_size / o.num_attention_heads,
       .attention = {.mask_type = cross ? o.enc_dec_mask_type : o.attention.mask_type,
                     .window_left = cross ? o.enc_dec_window_left : o.attention.window_left,
                     .window_right = cross ? o.enc_dec_window_right : o.attention.window_right,
                     .attention_dropout = o.attention.attention_dropout,
                     .softcap = o.attention.softcap}});
  c.attention.sequences = oracle::dense_sequences(o.attention.layout, kBatch, kSeq, sk);
  c.attention.max_q = kSeq;
  c.attention.max_kv = sk;
  c.epsilon = o.epsilon;
  c.zero_centered = o.zero_centered_gamma;
  c.input_norm = cross || !o.output_layernorm;
  c.cross = cross;
  c.split = !o.fuse_qkv_params;
  c.weights_interleaved = o.qkv_weight_interleaved;
  c.qk_norm = o.qk_norm;
  c.qk_epsilon = o.qk_norm_epsilon;
  return c;
}

oracle::LayerConfig make_oracle_config(const TransformerLayerOptions& o) {
  oracle::LayerConfig c;
  c.mha = make_attention_config(o, false);
  c.inter = make_attention_config(o, true);
  c.mlp = {.hidden = o.hidden_size,
           .ffn = o.ffn_hidden_size,
           .activation = o.activation,
           .epsilon = o.epsilon,
           .zero_centered = o.zero_centered_gamma};
  c.hidden_dropout = o.hidden_dropout;
  c.drop_path = o.drop_path_rate;
  c.parallel = o.parallel_attention_mlp;
  c.decoder = o.layer_type == LayerType::kDecoder;
  c.post_norm_residual = o.apply_residual_connection_post_layernorm;
  c.output_norm = o.output_layernorm;
  c.paths = o.attention.layout == Layout::kSBHD ? kSeq : kBatch;
  return c;
}

class LayerVariant : public ::testing::TestWithParam<Case> {};

TEST_P(LayerVariant, MatchesFiniteDifferences) {
  const TransformerLayerOptions& o = GetParam().options;
  const bool decoder = o.layer_type == LayerType::kDecoder;
  auto layer = take(TransformerLayer::create(o));
  randomize(*layer, 31, 0.4);
  Params in = params_of(*layer);
  const int64_t n = kBatch * kSeq * kHidden;
  in["x"] = random_values(n, 1);
  if (decoder) in["encoder"] = random_values(kBatch * kEncoder * kHidden, 3);
  const auto shaped = [&](const Values& v, int64_t s) {
    return o.attention.layout == Layout::kSBHD ? tensor({s, kBatch, kHidden}, v)
                                               : tensor({kBatch, s, kHidden}, v);
  };
  AttentionInputs cross;
  if (decoder) cross.encoder_output = shaped(in["encoder"], kEncoder);
  ContextScope scope{Context(43)};
  Ctx ctx;
  const Tensor y =
      take(layer->forward(shaped(in["x"], kSeq), &ctx, {}, {}, decoder ? &cross : nullptr));
  const Values w = random_values(n, 2);
  Tensor d_encoder;
  const Tensor dx = take(layer->backward(shaped(w, kSeq), ctx, nullptr, &d_encoder));
  std::map<std::string, Values> got{{"y", values_of(y)}, {"x", values_of(dx)}};
  if (decoder) got["encoder"] = values_of(d_encoder);
  for (const NamedParameter& p : layer->parameters()) got[p.name] = values_of(p.grad());
  oracle::expect_no_gradient(got, "key_bias");
  const oracle::LayerConfig config = make_oracle_config(o);
  oracle::Function f = [&](const Params& p) {
    return oracle::layer(config, p, p.at("x"), {.seed = 43});
  };
  oracle::expect_matches(f, in, w, got, 1e-4);
}

INSTANTIATE_TEST_SUITE_P(All, LayerVariant, ::testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

TEST(LayerPerCall, MaskTypeAndWindowReplaceTheLayers) {
  TransformerLayerOptions options{
      .hidden_size = kHidden, .ffn_hidden_size = 10, .num_attention_heads = 3, .seed = 1};
  auto layer = take(TransformerLayer::create(options));
  options.attention.mask_type = MaskType::kNone;
  options.attention.window_left = 1;
  auto other = take(TransformerLayer::create(options));
  const Tensor x = tensor({kSeq, kBatch, kHidden}, random_values(kSeq * kBatch * kHidden, 1));
  AttentionInputs inputs;
  inputs.mask_type = MaskType::kNone;
  inputs.window_left = 1;
  EXPECT_TRUE(
      same_bits(take(layer->forward(x, nullptr, inputs)), take(other->forward(x, nullptr))));
  EXPECT_FALSE(same_bits(take(layer->forward(x, nullptr)), take(other->forward(x, nullptr))));
}

TEST(LayerNames, OfADecoderWithAnOutputNorm) {
  auto layer = take(TransformerLayer::create({.hidden_size = kHidden,
                                              .ffn_hidden_size = 10,
                                              .num_attention_heads = 3,
                                              .bias = false,
                                              .layer_type = LayerType::kDecoder,
                                              .output_layernorm = true,
                                              .fuse_qkv_params = false}));
  std::vector<std::string> names;
  for (const NamedParameter& p : layer->parameters()) names.push_back(p.name);
  EXPECT_EQ(names,
            (std::vector<std::string>{
                "self_attention.qkv.query_weight", "self_attention.qkv.key_weight",
                "self_attention.qkv.value_weight", "self_attention.proj.weight",
                "inter_attention.layernorm_query.layer_norm_weight",
                "inter_attention.layernorm_query.layer_norm_bias",
                "inter_attention.layernorm_query.query_weight",
                "inter_attention.key_value.key_weight", "inter_attention.key_value.value_weight",
                "inter_attention.proj.weight", "layernorm_mlp.layer_norm_weight",
                "layernorm_mlp.layer_norm_bias", "layernorm_mlp.fc1_weight",
                "layernorm_mlp.fc2_weight", "layernorm.weight", "layernorm.bias"}));
}

// A copy of a decoder's ctx and a recomputed decoder both give the same backward, bit by bit.
TEST(LayerBackwards, OfACopiedCtxAndOfARecomputedSegmentAreEqual) {
  auto layer = take(TransformerLayer::create({.hidden_size = kHidden,
                                              .ffn_hidden_size = 10,
                                              .num_attention_heads = 3,
                                              .hidden_dropout = 0.1f,
                                              .attention = {.attention_dropout = 0.1f},
                                              .seed = 4,
                                              .layer_type = LayerType::kDecoder,
                                              .apply_residual_connection_post_layernorm = true,
                                              .drop_path_rate = 0.2f,
                                              .fuse_qkv_params = false,
                                              .qk_norm = QkNorm::kRMSNorm}));
  randomize(*layer, 5, 0.4);
  const int64_t n = kSeq * kBatch * kHidden;
  const Tensor x = tensor({kSeq, kBatch, kHidden}, random_values(n, 1));
  const Tensor dy = tensor({kSeq, kBatch, kHidden}, random_values(n, 2));
  AttentionInputs cross, inputs;
  cross.encoder_output =
      tensor({kEncoder, kBatch, kHidden}, random_values(kEncoder * kBatch * kHidden, 3));
  inputs.rotary_angles = take(init::rotary_angles({.dim = 4, .max_seqlen = 8}));
  for (const bool fp8 : {false, true}) {
    const auto scoped = [&](auto run) {
      ContextScope scope{Context(5)};
      autocast precision(fp8, Float8CurrentScaling{});
      return run();
    };
    const auto gradients = [&] {
      std::vector<Values> all;
      for (const NamedParameter& p : layer->parameters()) all.push_back(values_of(p.grad()));
      check(layer->zero_grad());
      return all;
    };
    Ctx ctx;
    const Tensor y = scoped([&] { return take(layer->forward(x, &ctx, inputs, {}, &cross)); });
    Ctx copy = ctx;
    const Tensor dx = take(layer->backward(dy, ctx));
    const auto first = gradients();
    EXPECT_TRUE(same_bits(dx, take(layer->backward(dy, copy))));
    EXPECT_EQ(gradients(), first);
    const SegmentRun run = scoped([&] {
      return take(checkpoint(
          [&](const Tensor& in) {
            return run_segment(*layer, in, inputs, ForwardOptions(), &cross);
          },
          x));
    });
    EXPECT_TRUE(same_bits(run.y, y));
    EXPECT_TRUE(same_bits(take(run.backward(dy)), dx));
    EXPECT_EQ(gradients(), first);
  }
}

// The encoder output may be a value on the tape.
TEST(LayerOnTape, CrossAttentionTakesTheEncoderAsAValue) {
  const TransformerLayerOptions options{.hidden_size = kHidden,
                                        .ffn_hidden_size = 10,
                                        .num_attention_heads = 3,
                                        .seed = 4,
                                        .layer_type = LayerType::kDecoder};
  const Layer<TransformerLayer> decoder(options);
  const Layer<MultiheadAttention> attention({.hidden_size = kHidden,
                                             .num_attention_heads = 3,
                                             .attention = {.mask_type = MaskType::kNone},
                                             .attention_type = AttentionType::kCross});
  randomize(*decoder, 5, 0.4);
  randomize(*attention, 6, 0.4);
  const Tensor x = tensor({kSeq, kBatch, kHidden}, random_values(kSeq * kBatch * kHidden, 1));
  const Tensor dy = tensor({kSeq, kBatch, kHidden}, random_values(kSeq * kBatch * kHidden, 2));
  AttentionInputs cross;
  cross.encoder_output =
      tensor({kEncoder, kBatch, kHidden}, random_values(kEncoder * kBatch * kHidden, 3));
  Ctx ctx;
  Tensor d_encoder;
  const auto expect_equal = [&](auto on_tape, const Tensor& y, const Tensor& dx) {
    Tape tape;
    const Value in = tape.input(x, true), encoder = tape.input(cross.encoder_output, true);
    const Value out = on_tape(in, encoder);
    ASSERT_OK(out.status());
    EXPECT_TRUE(same_bits(out.tensor(), y));
    ASSERT_OK(tape.backward(out, dy));
    EXPECT_TRUE(same_bits(in.grad(), dx));
    EXPECT_TRUE(same_bits(encoder.grad(), d_encoder));
  };
  Tensor y = take(decoder->forward(x, &ctx, {}, {}, &cross));
  Tensor dx = take(decoder->backward(dy, ctx, nullptr, &d_encoder));
  expect_equal([&](const Value& a, const Value& b) { return decoder(a, b); }, y, dx);
  y = take(attention->forward(x, &ctx, cross));
  dx = take(attention->backward(dy, ctx, nullptr, nullptr, nullptr, &d_encoder));
  expect_equal([&](const Value& a, const Value& b) { return attention(a, b); }, y, dx);
}

TEST(DropPathModule, DropsWholePathsAndKeepsTheMean) {
  constexpr int64_t kPaths = 2000, kWidth = 3;
  DropPath path(0.25f);
  const Values xs = random_values(kPaths * kWidth, 1, 1, true);
  const Values w = random_values(kPaths * kWidth, 2, 1, true);
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const double rounding = dtype == DType::kF32 ? 1e-6 : 0x1p-8;
    ContextScope scope{Context(7)};
    Ctx ctx;
    const Tensor x = tensor({kPaths, kWidth}, xs, dtype);
    const Values y = values_of(take(path.forward(x, &ctx)));
    const Values dx = values_of(take(path.backward(tensor({kPaths, kWidth}, w, dtype), ctx)));
    int64_t kept = 0;
    for (int64_t i = 0; i < kPaths; ++i) {
      const bool dropped = y[i * kWidth] == 0;
      kept += !dropped;
      for (int64_t c = i * kWidth; c < (i + 1) * kWidth; ++c) {
        ASSERT_NEAR(y[c], dropped ? 0 : xs[c] / 0.75, rounding * 1.5);
        ASSERT_NEAR(dx[c], dropped ? 0 : w[c] / 0.75, rounding * 1.5);
      }
    }
    EXPECT_NEAR(static_cast<double>(kept) / kPaths, 0.75, 0.05);  // within 5 standard deviations
    EXPECT_TRUE(same_bits(take(path.forward(x, nullptr)), x));
  }
}

TEST(LayerVariantRules, WhatDoesNotGoTogetherIsNamed) {
  const TransformerLayerOptions base{
      .hidden_size = kHidden, .ffn_hidden_size = 10, .num_attention_heads = 3};
  const auto fails = [&](auto change, const char* what) {
    TransformerLayerOptions options = base;
    change(options);
    EXPECT_FAILS(TransformerLayer::create(options).status(), kInvalidArgument, what);
  };
  fails([](auto& o) { o.parallel_attention_mlp = o.output_layernorm = true; }, "output_layernorm");
  fails(
      [](auto& o) { o.parallel_attention_mlp = o.apply_residual_connection_post_layernorm = true; },
      "apply_residual_connection_post_layernorm");
  fails(
      [](auto& o) {
        o.parallel_attention_mlp = true;
        o.layer_type = LayerType::kDecoder;
      },
      "kDecoder");
  fails([](auto& o) { o.drop_path_rate = 1; }, "drop_path_rate");
  const Tensor x = tensor({kSeq, 1, kHidden}, random_values(kSeq * kHidden, 1));
  AttentionInputs cross;
  cross.encoder_output = x;
  auto encoder = take(TransformerLayer::create(base));
  EXPECT_FAILS(encoder->forward(x, nullptr, {}, {}, &cross).status(), kInvalidArgument,
               "no cross-attention");
  TransformerLayerOptions options = base;
  options.layer_type = LayerType::kDecoder;
  EXPECT_FAILS(take(TransformerLayer::create(options))->forward(x, nullptr).status(),
               kInvalidArgument, "give `cross`");
}

}  // namespace
}  // namespace te_fl::nn::testing::layer_variants_test
