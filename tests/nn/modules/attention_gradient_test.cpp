// DotProductAttention, MultiheadAttention and TransformerLayer against double-precision
// implementations.
#include "oracle.hpp"
#include "support/expect.hpp"

namespace te_fl::nn::testing::attention_gradient_test {
namespace {

struct Case {
  std::string name;
  DotProductAttentionOptions options = {};
  int64_t batch = 2, sq = 5, sk = 5;
  bool bias = false, alibi = false;
  std::vector<int64_t> lengths_q = {}, lengths_kv = {};  // padding masks
};

std::vector<Case> attention_cases() {
  const DotProductAttentionOptions base{.num_attention_heads = 4, .head_dim = 6};
  std::vector<Case> cases;
  auto with = [&](const std::string& name, auto change) {
    Case c{.name = name, .options = base};
    change(c);
    cases.push_back(std::move(c));
  };
  with("sbhd_causal", [](Case&) {});
  with("bshd_causal_gqa", [](Case& c) {
    c.options.attention.layout = Layout::kBSHD;
    c.options.num_gqa_groups = 2;
  });
  with("none_cross_length_mqa", [](Case& c) {
    c.options.attention.mask_type = MaskType::kNone;
    c.sk = 7;
    c.options.num_gqa_groups = 1;
  });
  with("causal_bottom_right", [](Case& c) {
    c.options.attention.mask_type = MaskType::kCausalBottomRight;
    c.sk = 8;
  });
  with("arbitrary", [](Case& c) { c.options.attention.mask_type = MaskType::kArbitrary; });
  with("window", [](Case& c) {
    c.options.attention.window_left = 2;
    c.sq = c.sk = 7;
  });
  with("window_both", [](Case& c) {
    c.options.attention.mask_type = MaskType::kNone;
    c.options.attention.window_left = 1;
    c.options.attention.window_right = 2;
  });
  with("off_by_one", [](Case& c) { c.options.attention.softmax_type = SoftmaxType::kOffByOne; });
  with("learnable_sink", [](Case& c) {
    c.options.attention.softmax_type = SoftmaxType::kLearnable;
    c.options.attention.layout = Layout::kBSHD;
  });
  with("bias", [](Case& c) {
    c.bias = true;
    c.options.attention.mask_type = MaskType::kNone;
  });
  with("alibi", [](Case& c) { c.alibi = true; });
  with("scale", [](Case& c) { c.options.attention.softmax_scale = 0.9f; });
  with("dropout", [](Case& c) { c.options.attention.attention_dropout = 0.25f; });
  with("softcap_bias_alibi", [](Case& c) {
    c.options.attention.softcap = 0.5f;
    c.bias = c.alibi = true;
  });
  with("padding", [](Case& c) {
    c.options.attention.mask_type = MaskType::kPadding;
    c.lengths_q = {3, 5};
    c.lengths_kv = {4, 2};
  });
  with("padding_causal", [](Case& c) {
    c.options.attention.mask_type = MaskType::kPaddingCausal;
    c.options.attention.layout = Layout::kBSHD;
    c.lengths_q = c.lengths_kv = {5, 2};
  });
  return cases;
}

class AttentionGradient : public ::testing::TestWithParam<Case> {};

TEST_P(AttentionGradient, MatchesFiniteDifferences) {
  const Case& c = GetParam();
  auto module = take(DotProductAttention::create(c.options));
  randomize(*module, 77);
  oracle::AttentionConfig config = oracle::make_config(c.options);
  config.sequences = oracle::dense_sequences(c.options.attention.layout, c.batch, c.sq, c.sk);
  config.max_q = c.sq;
  config.max_kv = c.sk;
  config.lengths_q = c.lengths_q;
  config.lengths_kv = c.lengths_kv;
  AttentionInputs inputs;
  if (c.options.attention.mask_type == MaskType::kArbitrary) {
    config.arbitrary.resize(static_cast<size_t>(c.sq * c.sk));
    Random random(3);
    for (uint8_t& m : config.arbitrary) m = random.below(3) == 0;
    // One query row is fully masked.
    for (int64_t j = 0; j < c.sk; ++j) config.arbitrary[2 * c.sk + j] = 1;
    inputs.attn_mask = take(Tensor::empty({1, 1, c.sq, c.sk}, DType::kU8));
    std::copy(config.arbitrary.begin(), config.arbitrary.end(), inputs.attn_mask.data<uint8_t>());
  }
  if (c.alibi) {
    config.alibi = random_values(config.heads, 5, 0.5);
    inputs.alibi_slopes = tensor({config.heads}, config.alibi);
  }
  if (!c.lengths_q.empty()) {
    inputs.cu_seqlens_q = cu_seqlens(c.lengths_q);
    inputs.cu_seqlens_kv = cu_seqlens(c.lengths_kv);
  }
  const bool sbhd = c.options.attention.layout == Layout::kSBHD;
  const int64_t nq = c.batch * c.sq * config.heads * config.dim;
  const int64_t nk = c.batch * c.sk * config.groups * config.dim;
  Params in{{"q", random_values(nq, 1)},
            {"k", random_values(nk, 2)},
            {"v", random_values(nk, 3)},
            {"bias", {}}};
  if (c.bias) {
    in["bias"] = random_values(c.sq * c.sk, 4);
    inputs.bias = tensor({1, 1, c.sq, c.sk}, in["bias"]);
  }
  const Params sinks = params_of(*module);
  in["sink"] = sinks.empty() ? Values{} : sinks.begin()->second;
  auto shaped = [&](const Values& v, int64_t s, int64_t heads) {
    return sbhd ? tensor({s, c.batch, heads, config.dim}, v)
                : tensor({c.batch, s, heads, config.dim}, v);
  };
  ContextScope scope{Context(1234)};
  Ctx ctx;
  const Tensor q = shaped(in["q"], c.sq, config.heads), k = shaped(in["k"], c.sk, config.groups),
               v = shaped(in["v"], c.sk, config.groups);
  const Tensor o = take(module->forward(q, k, v, &ctx, inputs));
  const Values w = random_values(nq, 9);
  auto grads = take(module->backward(shaped(w, c.sq, config.heads), ctx));
  std::map<std::string, Values> got{{"y", values_of(o)},
                                    {"q", values_of(grads.dq)},
                                    {"k", values_of(grads.dk)},
                                    {"v", values_of(grads.dv)}};
  if (c.bias) got["bias"] = values_of(grads.dbias);
  if (!sinks.empty()) got["sink"] = values_of(module->parameters()[0].grad());
  oracle::Function f = [&](const Params& p) {
    oracle::DropoutStream stream{.seed = 1234};
    return oracle::attention(config, p.at("q"), p.at("k"), p.at("v"), p.at("bias"), p.at("sink"),
                             stream);
  };
  oracle::expect_matches(f, in, w, got, 5e-5);
}

INSTANTIATE_TEST_SUITE_P(All, AttentionGradient, ::testing::ValuesIn(attention_cases()),
                         [](const auto& info) { return info.param.name; });

TEST(AttentionThd, SequencesDoNotSeeEachOther) {
  const std::vector<int64_t> lengths = {4, 1, 6};
  auto module =
      take(DotProductAttention::create({.num_attention_heads = 4,
                                        .head_dim = 6,
                                        .num_gqa_groups = 2,
                                        .attention = {.layout = Layout::kTHD,
                                                      .mask_type = MaskType::kPaddingCausal,
                                                      .attention_dropout = 0.2f}}));
  oracle::AttentionConfig config;
  config.heads = 4, config.groups = 2, config.dim = 6;
  config.mask = MaskType::kPaddingCausal;
  config.scale = 1 / std::sqrt(6.0);
  config.dropout = 0.2f;
  config.max_q = config.max_kv = 6;
  int64_t start = 0;
  for (int64_t l : lengths) {
    std::vector<int64_t> rows;
    for (int64_t i = 0; i < l; ++i) rows.push_back(start + i);
    config.sequences.q_rows.push_back(rows);
    config.sequences.kv_rows.push_back(rows);
    start += l;
  }
  AttentionInputs inputs;
  inputs.cu_seqlens_q = cu_seqlens(lengths);
  inputs.max_seqlen_q = 6;
  Params in{{"q", random_values(11 * 24, 1)},
            {"k", random_values(11 * 12, 2)},
            {"v", random_values(11 * 12, 3)}};
  ContextScope scope{Context(5)};
  Ctx ctx;
  const Tensor o = take(module->forward(tensor({11, 4, 6}, in["q"]), tensor({11, 2, 6}, in["k"]),
                                        tensor({11, 2, 6}, in["v"]), &ctx, inputs));
  const Values w = random_values(11 * 24, 9);
  auto grads = take(module->backward(tensor({11, 4, 6}, w), ctx));
  oracle::Function f = [&](const Params& p) {
    oracle::DropoutStream stream{.seed = 5};
    return oracle::attention(config, p.at("q"), p.at("k"), p.at("v"), {}, {}, stream);
  };
  oracle::expect_matches(f, in, w,
                         {{"y", values_of(o)},
                          {"q", values_of(grads.dq)},
                          {"k", values_of(grads.dk)},
                          {"v", values_of(grads.dv)}},
                         5e-5);
}

TEST(AttentionThd, GapsBetweenSequencesAreZeroAndNeverRead) {
  auto module = take(DotProductAttention::create(
      {.num_attention_heads = 2,
       .head_dim = 4,
       .attention = {.layout = Layout::kTHD, .mask_type = MaskType::kPaddingCausal}}));
  AttentionInputs inputs;
  inputs.cu_seqlens_q = cu_seqlens({3, 2});         // true lengths
  inputs.cu_seqlens_q_padded = cu_seqlens({4, 4});  // rows 3, 6 and 7 are padding between the
                                                    // sequences
  inputs.max_seqlen_q = 3;
  auto run = [&](double gap) {
    auto part = [&](uint64_t seed) {
      Values v = random_values(8 * 8, seed);
      for (int row : {3, 6, 7}) std::fill_n(v.begin() + row * 8, 8, gap);
      return tensor({8, 2, 4}, v);
    };
    Ctx ctx;
    const Tensor o = take(module->forward(part(1), part(2), part(3), &ctx, inputs));
    auto g = take(module->backward(part(4), ctx));
    return std::vector<Values>{values_of(o), values_of(g.dq), values_of(g.dk), values_of(g.dv)};
  };
  const auto a = run(0), b = run(std::numeric_limits<double>::quiet_NaN());
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(a[i], b[i]);
    for (int row : {3, 6, 7}) {
      for (int c = 0; c < 8; ++c) EXPECT_EQ(a[i][row * 8 + c], 0);
    }
    EXPECT_NE(a[i][8], 0);  // row 1: the first row of dq is zero by causality
  }
}

struct LayerCase {
  std::string name;
  TransformerLayerOptions options = {};
  int64_t rotated = 0;
};

std::vector<LayerCase> layer_cases() {
  const TransformerLayerOptions base{
      .hidden_size = 12, .ffn_hidden_size = 10, .num_attention_heads = 3};
  std::vector<LayerCase> cases;
  auto with = [&](const std::string& name, auto change) {
    LayerCase c{.name = name, .options = base};
    change(c);
    cases.push_back(std::move(c));
  };
  with("gpt", [](LayerCase&) {});
  with("gpt_bshd_dropout", [](LayerCase& c) {
    c.options.attention.layout = Layout::kBSHD;
    c.options.hidden_dropout = 0.2f;
    c.options.attention.attention_dropout = 0.1f;
  });
  with("parallel", [](LayerCase& c) {
    c.options.parallel_attention_mlp = true;
    c.options.hidden_dropout = 0.3f;
  });
  with("llama", [](LayerCase& c) {
    c.options.hidden_size = 16, c.options.num_attention_heads = 4, c.options.num_gqa_groups = 2;
    c.options.normalization = Normalization::kRMSNorm, c.options.activation = Activation::kSwiglu;
    c.options.bias = false;
    c.rotated = 4;
  });
  with("llama_bshd_interleaved_partial", [](LayerCase& c) {
    c.options.hidden_size = 16, c.options.num_attention_heads = 2,
    c.options.attention.layout = Layout::kBSHD;
    c.options.normalization = Normalization::kRMSNorm, c.options.activation = Activation::kSwiglu;
    c.options.bias = false, c.options.zero_centered_gamma = true,
    c.options.rotary_interleaved = true;
    c.rotated = 4;  // of 8 columns
  });
  with("gqa_plain_sink_window", [](LayerCase& c) {
    c.options.num_attention_heads = 4, c.options.num_gqa_groups = 2, c.options.kv_channels = 5;
    c.options.attention.softmax_type = SoftmaxType::kLearnable, c.options.attention.window_left = 2;
  });
  with("softcap", [](LayerCase& c) { c.options.attention.softcap = 0.5f; });
  with("parallel_rms_clamped", [](LayerCase& c) {
    c.options.parallel_attention_mlp = true;
    c.options.normalization = Normalization::kRMSNorm;
    c.options.activation = Activation::kClampedSwiglu;
    c.options.clamp_limit = 1;
  });
  return cases;
}

oracle::LayerConfig oracle_layer(const TransformerLayerOptions& o, int64_t rotated, int64_t batch,
                                 int64_t s) {
  oracle::LayerConfig c;
  const int64_t dim = o.kv_channels == 0 ? o.hidden_size / o.num_attention_heads : o.kv_channels;
  c.mha.hidden = o.hidden_size;
  c.mha.attention = oracle::make_config({.num_attention_heads = o.num_attention_heads,
                                         .head_dim = dim,
                                         .num_gqa_groups = o.num_gqa_groups,
                                         .attention = o.attention});
  c.mha.attention.sequences = oracle::dense_sequences(o.attention.layout, batch, s, s);
  c.mha.attention.max_q = c.mha.attention.max_kv = s;
  c.mha.epsilon = c.mlp.epsilon = o.epsilon;
  c.mha.zero_centered = c.mlp.zero_centered = o.zero_centered_gamma;
  c.mha.rotated = rotated;
  c.mha.interleaved = o.rotary_interleaved;
  for (int64_t r = 0; r < batch * s; ++r)
    c.mha.positions.push_back(o.attention.layout == Layout::kSBHD ? r / batch : r % s);
  c.mlp.hidden = o.hidden_size;
  c.mlp.ffn = o.ffn_hidden_size;
  c.mlp.activation = o.activation;
  c.mlp.limit = o.clamp_limit;
  c.mlp.alpha = o.clamp_alpha;
  c.hidden_dropout = o.hidden_dropout;
  c.parallel = o.parallel_attention_mlp;
  return c;
}

class LayerGradient : public ::testing::TestWithParam<LayerCase> {};

TEST_P(LayerGradient, MatchesFiniteDifferences) {
  const TransformerLayerOptions& o = GetParam().options;
  constexpr int64_t kBatch = 2, kSeq = 5;
  auto layer = take(TransformerLayer::create(o));
  randomize(*layer, 31, 0.4);
  const int64_t n = kBatch * kSeq * o.hidden_size;
  Params in = params_of(*layer);
  in["x"] = random_values(n, 1);
  const oracle::LayerConfig config = oracle_layer(o, GetParam().rotated, kBatch, kSeq);
  auto shaped = [&](const Values& v) {
    return o.attention.layout == Layout::kSBHD ? tensor({kSeq, kBatch, o.hidden_size}, v)
                                               : tensor({kBatch, kSeq, o.hidden_size}, v);
  };
  AttentionInputs inputs;
  if (GetParam().rotated > 0) {
    inputs.rotary_angles = take(init::rotary_angles(
        {.dim = GetParam().rotated, .max_seqlen = 8, .interleaved = o.rotary_interleaved}));
  }
  ContextScope scope{Context(42)};
  Ctx ctx;
  const Tensor y = take(layer->forward(shaped(in["x"]), &ctx, inputs));
  const Values w = random_values(n, 2);
  const Tensor dx = take(layer->backward(shaped(w), ctx));
  std::map<std::string, Values> got{{"y", values_of(y)}, {"x", values_of(dx)}};
  for (const NamedParameter& p : layer->parameters()) got[p.name] = values_of(p.grad());
  oracle::Function f = [&](const Params& p) {
    return oracle::layer(config, p, p.at("x"), {.seed = 42});
  };
  oracle::expect_matches(f, in, w, got, 5e-5);
}

INSTANTIATE_TEST_SUITE_P(All, LayerGradient, ::testing::ValuesIn(layer_cases()),
                         [](const auto& info) { return info.param.name; });

TEST(LayerThd, EqualsEachSequenceAlone) {
  const std::vector<int64_t> lengths = {3, 5};
  TransformerLayerOptions options{
      .hidden_size = 16,
      .ffn_hidden_size = 12,
      .num_attention_heads = 4,
      .num_gqa_groups = 2,
      .activation = Activation::kSwiglu,
      .normalization = Normalization::kRMSNorm,
      .bias = false,
      .attention = {.layout = Layout::kTHD, .mask_type = MaskType::kPaddingCausal},
      .seed = 3};
  auto packed = take(TransformerLayer::create(options));
  options.attention.layout = Layout::kSBHD;
  options.attention.mask_type = MaskType::kCausal;
  auto dense = take(TransformerLayer::create(options));
  randomize(*packed, 8, 0.3);
  randomize(*dense, 8, 0.3);
  AttentionInputs inputs;
  inputs.rotary_angles = take(init::rotary_angles({.dim = 4, .max_seqlen = 8}));
  const Values xs = random_values(8 * 16, 1), w = random_values(8 * 16, 2);
  AttentionInputs thd = inputs;
  thd.cu_seqlens_q = cu_seqlens(lengths);
  thd.max_seqlen_q = 5;
  Ctx ctx;
  const Values y = values_of(take(packed->forward(tensor({8, 16}, xs), &ctx, thd)));
  const Values dx = values_of(take(packed->backward(tensor({8, 16}, w), ctx)));
  int64_t start = 0;
  for (int64_t l : lengths) {
    const Values part(xs.begin() + start * 16, xs.begin() + (start + l) * 16);
    const Values w_part(w.begin() + start * 16, w.begin() + (start + l) * 16);
    const Values want = values_of(take(dense->forward(tensor({l, 1, 16}, part), &ctx, inputs)));
    const Values want_dx = values_of(take(dense->backward(tensor({l, 1, 16}, w_part), ctx)));
    EXPECT_LT(relative_l2(Values(y.begin() + start * 16, y.begin() + (start + l) * 16), want),
              1e-5);
    EXPECT_LT(relative_l2(Values(dx.begin() + start * 16, dx.begin() + (start + l) * 16), want_dx),
              1e-5);
    start += l;
  }
  const auto a = packed->parameters(), b = dense->parameters();
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_LT(relative_l2(values_of(a[i].grad()), values_of(b[i].grad())), 1e-5) << a[i].name;
  }
}

TEST(Mha, WithoutInputNormAndWithResidualAndBiasGradients) {
  auto module = take(MultiheadAttention::create({.hidden_size = 12,
                                                 .num_attention_heads = 3,
                                                 .input_layernorm = false,
                                                 .attention = {.mask_type = MaskType::kNone}}));
  randomize(*module, 6, 0.4);
  constexpr int64_t kBatch = 2, kSeq = 4;
  oracle::MhaConfig config;
  config.hidden = 12;
  config.input_norm = false;
  config.attention = oracle::make_config(
      {.num_attention_heads = 3, .head_dim = 4, .attention = {.mask_type = MaskType::kNone}});
  config.attention.sequences = oracle::dense_sequences(Layout::kSBHD, kBatch, kSeq, kSeq);
  config.attention.max_q = config.attention.max_kv = kSeq;
  Params in = params_of(*module);
  in["x"] = random_values(kBatch * kSeq * 12, 1);
  in["bias"] = random_values(kSeq * kSeq, 2);
  const Values w = random_values(kBatch * kSeq * 12, 3), r = random_values(kBatch * kSeq * 12, 4);
  const Tensor residual = tensor({kSeq, kBatch, 12}, r);
  AttentionInputs inputs;
  inputs.bias = tensor({1, 1, kSeq, kSeq}, in["bias"]);
  Ctx ctx;
  Tensor dbias;
  const Tensor y = take(module->forward(tensor({kSeq, kBatch, 12}, in["x"]), &ctx, inputs));
  Values dx =
      values_of(take(module->backward(tensor({kSeq, kBatch, 12}, w), ctx, &residual, &dbias)));
  for (size_t i = 0; i < dx.size(); ++i) dx[i] -= r[i];
  std::map<std::string, Values> got{{"y", values_of(y)}, {"x", dx}, {"bias", values_of(dbias)}};
  for (const NamedParameter& p : module->parameters()) got[p.name] = values_of(p.grad());
  EXPECT_EQ(module->parameters()[0].name, "qkv.weight");
  oracle::Function f = [&](const Params& p) {
    oracle::DropoutStream none;
    return oracle::mha(config, p, "", p.at("x"), p.at("bias"), none);
  };
  oracle::expect_matches(f, in, w, got, 5e-5);
}

TEST(Attention, WrongShapesAreNamed) {
  auto module = take(
      DotProductAttention::create({.num_attention_heads = 4, .head_dim = 6, .num_gqa_groups = 2}));
  const Tensor q = tensor({3, 1, 4, 6}, random_values(72, 1)),
               k = tensor({3, 1, 2, 6}, random_values(36, 1));
  auto text = [](const auto& result) {
    return result.ok() ? std::string("ok") : result.status().to_string();
  };
  EXPECT_EQ(text(module->forward(q, k, k, nullptr)), "ok");
  const std::string wrong = text(module->forward(q, q, k, nullptr));
  EXPECT_HAS(wrong, "k is f32[3,1,4,6]");
  EXPECT_HAS(wrong, "[sequence, batch, 2, 6]");
  auto thd = take(DotProductAttention::create(
      {.num_attention_heads = 1, .head_dim = 6, .attention = {.layout = Layout::kTHD}}));
  const Tensor t = tensor({3, 1, 6}, random_values(18, 1));
  EXPECT_HAS(text(thd->forward(t, t, t, nullptr)), "cu_seqlens_q");
  auto mha = take(MultiheadAttention::create({.hidden_size = 12, .num_attention_heads = 3}));
  AttentionInputs inputs;
  inputs.rotary_angles = take(init::rotary_angles({.dim = 4, .max_seqlen = 2}));
  const std::string angles =
      text(mha->forward(tensor({3, 1, 12}, random_values(36, 1)), nullptr, inputs));
  EXPECT_HAS(angles, "positions >= 3");
}

}  // namespace
}  // namespace te_fl::nn::testing::attention_gradient_test
