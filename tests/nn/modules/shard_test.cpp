// The initial values of a module's shards, joined, equal those of the unsharded module.
#include <stdexcept>

#include "nn_test_util.hpp"
#include "support/expect.hpp"

namespace te_fl::nn::testing::shard_test {
namespace {

Values weight(const Module& module, const std::string& name = "weight") {
  for (const NamedParameter& p : module.parameters()) {
    if (p.name == name) return values_of(p.value());
  }
  throw std::runtime_error("no parameter " + name);
}

Values joined_rows(const std::vector<Values>& shards) {
  Values whole;
  for (const Values& shard : shards) whole.insert(whole.end(), shard.begin(), shard.end());
  return whole;
}

Values joined_columns(const std::vector<Values>& shards, int64_t rows) {
  Values whole;
  for (int64_t r = 0; r < rows; ++r) {
    for (const Values& shard : shards) {
      const auto width = static_cast<int64_t>(shard.size()) / rows;
      whole.insert(whole.end(), shard.begin() + r * width, shard.begin() + (r + 1) * width);
    }
  }
  return whole;
}

TEST(Shards, OfLinearByRowsAndByColumns) {
  constexpr int64_t kIn = 10, kOut = 12;
  const auto make = [](int64_t in, int64_t out, init::Shard shard) {
    return weight(*take(Linear::create(
        {.in_features = in, .out_features = out, .seed = 4, .shard = std::move(shard)})));
  };
  const Values whole = make(kIn, kOut, {});
  for (int64_t parts : {1, 2, 3}) {
    std::vector<Values> rows;
    for (int64_t i = 0; i < parts; ++i) {
      rows.push_back(make(kIn, kOut / parts, {{kOut, kIn}, {i * kOut / parts, 0}}));
    }
    EXPECT_EQ(joined_rows(rows), whole) << parts;
  }
  std::vector<Values> columns;
  for (int64_t i = 0; i < 5; ++i) columns.push_back(make(2, kOut, {{kOut, kIn}, {0, 2 * i}}));
  EXPECT_EQ(joined_columns(columns, kOut), whole);
}

TEST(Shards, OfLayerNormLinearAndEmbedding) {
  const auto linear = [](int64_t out, init::Shard shard) {
    return weight(*take(LayerNormLinear::create(
        {.in_features = 6, .out_features = out, .seed = 4, .shard = std::move(shard)})));
  };
  EXPECT_EQ(joined_rows({linear(3, {{8, 6}, {0, 0}}), linear(5, {{8, 6}, {3, 0}})}), linear(8, {}));
  const auto table = [](int64_t rows, init::Shard shard) {
    return weight(*take(Embedding::create(
        {.num_embeddings = rows, .hidden_size = 6, .seed = 4, .shard = std::move(shard)})));
  };
  EXPECT_EQ(joined_rows({table(3, {{8, 6}, {0, 0}}), table(5, {{8, 6}, {3, 0}})}), table(8, {}));
}

TEST(Shards, OfAnMlpByFeatures) {
  constexpr int64_t kHidden = 6, kFfn = 8;
  for (Activation activation : {Activation::kGelu, Activation::kSwiglu}) {
    const auto make = [&](int64_t features, int64_t whole, int64_t begin) {
      return take(LayerNormMLP::create({.hidden_size = kHidden,
                                        .ffn_hidden_size = features,
                                        .activation = activation,
                                        .seed = 4,
                                        .ffn_whole = whole,
                                        .ffn_begin = begin}));
    };
    const auto whole = make(kFfn, 0, 0), low = make(3, kFfn, 0), high = make(5, kFfn, 3);
    const Values fc1[] = {weight(*low, "fc1_weight"), weight(*high, "fc1_weight")};
    Values expected;
    if (is_gated(activation)) {  // gated activations: the weight is the gate's half followed by the
                                 // other half
      const auto half = [](const Values& v, int which) {
        const auto n = static_cast<int64_t>(v.size()) / 2;
        return Values(v.begin() + which * n, v.begin() + (which + 1) * n);
      };
      expected = joined_rows({half(fc1[0], 0), half(fc1[1], 0), half(fc1[0], 1), half(fc1[1], 1)});
    } else {
      expected = joined_rows({fc1[0], fc1[1]});
    }
    EXPECT_EQ(expected, weight(*whole, "fc1_weight"));
    EXPECT_EQ(joined_columns({weight(*low, "fc2_weight"), weight(*high, "fc2_weight")}, kHidden),
              weight(*whole, "fc2_weight"));
    EXPECT_FAILS(
        LayerNormMLP::create(
            {.hidden_size = kHidden, .ffn_hidden_size = 5, .ffn_whole = kFfn, .ffn_begin = 4}),
        kInvalidArgument, "ffn_begin is 4");
    EXPECT_FAILS(LayerNormMLP::create({.hidden_size = 6, .ffn_hidden_size = 5, .ffn_begin = 1}),
                 kInvalidArgument, "ffn_whole 0");
  }
}

// Shards an attention layer's weights over two ranks by key/value groups, for each order of the
// rows of QKV.
TEST(Shards, OfAttentionByGroups) {
  constexpr int64_t kHidden = 12, kHeads = 6, kGroups = 3, kDim = 2;
  for (int order : {0, 1, 2}) {  // interleaved, not interleaved, split into separate parameters
    SCOPED_TRACE(order);
    const auto make = [&](int64_t groups, int64_t whole, int64_t begin) {
      return take(TransformerLayer::create({.hidden_size = kHidden,
                                            .ffn_hidden_size = 4,
                                            .num_attention_heads = groups * kHeads / kGroups,
                                            .num_gqa_groups = groups,
                                            .kv_channels = kDim,
                                            .seed = 4,
                                            .fuse_qkv_params = order != 2,
                                            .qkv_weight_interleaved = order == 0,
                                            .groups_whole = whole,
                                            .groups_begin = begin}));
    };
    const auto whole = make(kGroups, 0, 0), first = make(1, kGroups, 0), rest = make(2, kGroups, 1);
    const auto of = [](const TransformerLayer& layer, const std::string& name) {
      return weight(layer, "self_attention." + name);
    };
    EXPECT_EQ(joined_columns({of(*first, "proj.weight"), of(*rest, "proj.weight")}, kHidden),
              of(*whole, "proj.weight"));
    if (order == 2) {
      for (const std::string part : {"query_weight", "key_weight", "value_weight"}) {
        const std::string name = "layernorm_qkv." + part;
        EXPECT_EQ(joined_rows({of(*first, name), of(*rest, name)}), of(*whole, name));
      }
      continue;
    }
    const std::string name = "layernorm_qkv.weight";
    const Values a = of(*first, name), b = of(*rest, name);
    if (order == 0) {
      EXPECT_EQ(joined_rows({a, b}), of(*whole, name));
      continue;
    }
    // Each group has two heads of q and one each of k and v.
    const auto rows = [&](const Values& v, int64_t begin, int64_t count) {
      return Values(v.begin() + begin * kHidden, v.begin() + (begin + count) * kHidden);
    };
    EXPECT_EQ(joined_rows({rows(a, 0, 4), rows(b, 0, 8), rows(a, 4, 2), rows(b, 8, 4),
                           rows(a, 6, 2), rows(b, 12, 4)}),
              of(*whole, name));
  }
  EXPECT_FAILS(
      MultiheadAttention::create(
          {.hidden_size = 8, .num_attention_heads = 2, .groups_whole = 3, .groups_begin = 2}),
      kInvalidArgument, "groups_begin is 2 and groups_whole 3");
}

TEST(Shards, ThatDoNotFitAreRefused) {
  const auto made = [](init::Shard shard) {
    return Linear::create({.in_features = 4, .out_features = 4, .shard = std::move(shard)});
  };
  EXPECT_FAILS(made({{6, 4}, {3, 0}}), kInvalidArgument, "does not lie within");
  EXPECT_FAILS(made({{6}, {0}}), kInvalidArgument, "does not lie within");
  EXPECT_FAILS(made({{6, 4}, {0, 0}, {{0, 2}, {5, 2}}}), kInvalidArgument, "does not lie within");
  EXPECT_FAILS(made({{6, 4}, {0, 0}, {{0, 2}, {4, 1}}}), kInvalidArgument, "does not lie within");
  EXPECT_OK(made({{6, 4}, {0, 0}, {{0, 2}, {4, 2}}}));
}

}  // namespace
}  // namespace te_fl::nn::testing::shard_test
