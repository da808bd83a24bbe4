// Per-call masks and windows, and value heads of another size than the key heads, against the
// double-precision attention.
#include <cmath>

#include "oracle.hpp"
#include "support/expect.hpp"

namespace te_fl::nn::testing::attention_masks_test {
namespace {

constexpr int64_t kBatch = 2, kSq = 5, kSk = 6, kHeads = 4, kGroups = 2, kDim = 6;

// Runs a module with different query and key lengths; compares output and gradients with the oracle
// for `config`.
class AttentionCall {
 public:
  explicit AttentionCall(DotProductAttentionOptions options) : options_(options) {
    options_.num_attention_heads = kHeads;
    options_.num_gqa_groups = kGroups;
    options_.head_dim = kDim;
    config = oracle::make_config(options_);
    config.sequences = oracle::dense_sequences(options_.attention.layout, kBatch, kSq, kSk);
    config.max_q = kSq;
    config.max_kv = kSk;
  }

  void expect_matches() {
    auto module = take(DotProductAttention::create(options_));
    const int64_t dv = options_.value_head_dim == 0 ? kDim : options_.value_head_dim;
    Params in{{"q", random_values(kBatch * kSq * kHeads * kDim, 1)},
              {"k", random_values(kBatch * kSk * kGroups * kDim, 2)},
              {"v", random_values(kBatch * kSk * kGroups * dv, 3)}};
    const bool sbhd = options_.attention.layout == Layout::kSBHD;
    const auto shaped = [&](const Values& v, int64_t s, int64_t heads, int64_t dim) {
      return sbhd ? tensor({s, kBatch, heads, dim}, v) : tensor({kBatch, s, heads, dim}, v);
    };
    Ctx ctx;
    const Tensor o = take(module->forward(shaped(in["q"], kSq, kHeads, kDim),
                                          shaped(in["k"], kSk, kGroups, kDim),
                                          shaped(in["v"], kSk, kGroups, dv), &ctx, inputs));
    const Values w = random_values(kBatch * kSq * kHeads * dv, 9);
    const auto grads = take(module->backward(shaped(w, kSq, kHeads, dv), ctx));
    oracle::Function f = [&](const Params& p) {
      oracle::DropoutStream none;
      return oracle::attention(config, p.at("q"), p.at("k"), p.at("v"), {}, {}, none);
    };
    oracle::expect_matches(f, in, w,
                           {{"y", values_of(o)},
                            {"q", values_of(grads.dq)},
                            {"k", values_of(grads.dk)},
                            {"v", values_of(grads.dv)}},
                           5e-5);
  }

  oracle::AttentionConfig config;
  AttentionInputs inputs;

 private:
  DotProductAttentionOptions options_;
};

Tensor bytes(std::initializer_list<int64_t> shape, const std::vector<uint8_t>& values,
             DType dtype = DType::kU8) {
  Tensor t = take(Tensor::empty(shape, dtype));
  std::copy(values.begin(), values.end(), static_cast<uint8_t*>(t.raw_data()));
  return t;
}

TEST(AttentionPerCall, MaskTypeReplacesTheModules) {
  AttentionCall call({.attention = {.mask_type = MaskType::kCausal}});
  call.inputs.mask_type = call.config.mask = MaskType::kNone;
  call.expect_matches();
  call.inputs.mask_type = call.config.mask = MaskType::kCausalBottomRight;
  call.expect_matches();
}

TEST(AttentionPerCall, WindowReplacesTheModules) {
  AttentionCall call(
      {.attention = {.mask_type = MaskType::kNone, .window_left = 3, .window_right = 3}});
  call.inputs.window_left = call.config.window_left = 1;
  call.expect_matches();
  call.inputs.window_left = call.config.window_left = -1;
  call.inputs.window_right = call.config.window_right = 0;
  call.expect_matches();
}

TEST(AttentionPerCall, SoftcapReplacesTheModules) {
  AttentionCall call({.attention = {.mask_type = MaskType::kCausal, .softcap = 0.5f}});
  call.expect_matches();
  call.inputs.softcap = 0.125f, call.config.softcap = 0.125;
  call.expect_matches();
  call.inputs.softcap = 0.0f, call.config.softcap = 0;
  call.expect_matches();
}

TEST(AttentionPerCall, WrongSoftcapIsNamed) {
  EXPECT_FAILS(DotProductAttention::create(
                   {.num_attention_heads = 1, .head_dim = 4, .attention = {.softcap = -1.0f}})
                   .status(),
               kInvalidArgument, "softcap is -1");
  auto module = take(DotProductAttention::create({.num_attention_heads = 1, .head_dim = 4}));
  const Tensor x = tensor({2, 1, 1, 4}, random_values(8, 1));
  AttentionInputs inputs;
  inputs.softcap = INFINITY;
  EXPECT_FAILS(module->forward(x, x, x, nullptr, inputs).status(), kInvalidArgument,
               "softcap is inf");
}

TEST(AttentionPerCall, WrongWindowIsNamed) {
  auto module = take(DotProductAttention::create({.num_attention_heads = 1, .head_dim = 4}));
  const Tensor x = tensor({2, 1, 1, 4}, random_values(8, 1));
  AttentionInputs inputs;
  inputs.window_left = -2;
  EXPECT_FAILS(module->forward(x, x, x, nullptr, inputs).status(), kInvalidArgument,
               "the window is (-2, -1)");
}

TEST(AttentionValueHeads, HaveASizeOfTheirOwn) {
  for (const Layout layout : {Layout::kSBHD, Layout::kBSHD}) {
    for (const int64_t dv : {3, 10}) {
      SCOPED_TRACE(::testing::Message() << static_cast<int>(layout) << " " << dv);
      AttentionCall call(
          {.attention = {.layout = layout, .mask_type = MaskType::kCausalBottomRight},
           .value_head_dim = dv});
      call.expect_matches();
    }
  }
}

TEST(AttentionValueHeads, WrongSizeIsNamed) {
  auto module = take(
      DotProductAttention::create({.num_attention_heads = 1, .head_dim = 4, .value_head_dim = 2}));
  const Tensor x = tensor({2, 1, 1, 4}, random_values(8, 1));
  EXPECT_FAILS(module->forward(x, x, x, nullptr).status(), kInvalidArgument,
               "[sequence, batch, 1, 2]");
  EXPECT_FAILS(
      DotProductAttention::create({.num_attention_heads = 1, .head_dim = 4, .value_head_dim = -2})
          .status(),
      kInvalidArgument, "value_head_dim is -2");
}

TEST(AttentionArbitraryMask, BroadcastsAlongQueriesAndKeys) {
  AttentionCall keys({.attention = {.mask_type = MaskType::kArbitrary}});
  const std::vector<uint8_t> of_keys = {0, 1, 0, 0, 1, 0};
  keys.inputs.attn_mask = bytes({1, 1, 1, kSk}, of_keys);
  for (int64_t i = 0; i < kSq; ++i) {
    keys.config.arbitrary.insert(keys.config.arbitrary.end(), of_keys.begin(), of_keys.end());
  }
  keys.expect_matches();
  AttentionCall queries(
      {.attention = {.layout = Layout::kBSHD, .mask_type = MaskType::kArbitrary}});
  queries.inputs.attn_mask = bytes({1, 1, kSq, 1}, {0, 1, 0, 0, 1}, DType::kBool);
  for (const uint8_t masked : {0, 1, 0, 0, 1}) {
    queries.config.arbitrary.insert(queries.config.arbitrary.end(), kSk, masked);
  }
  queries.expect_matches();
}

struct PaddingCase {
  std::string name;
  MaskType type = MaskType::kPadding;
  std::vector<uint8_t> q, kv;
  int64_t window_left = -1;
};

class PaddingMask : public ::testing::TestWithParam<PaddingCase> {};

TEST_P(PaddingMask, HidesWhatItMarks) {
  const PaddingCase& c = GetParam();
  for (const bool rank4 : {true, false}) {
    AttentionCall call({.attention = {.mask_type = c.type, .window_left = c.window_left}});
    call.inputs.padding_mask_q =
        rank4 ? bytes({kBatch, 1, 1, kSq}, c.q, DType::kBool) : bytes({kBatch, kSq}, c.q);
    call.inputs.padding_mask_kv =
        rank4 ? bytes({kBatch, 1, 1, kSk}, c.kv, DType::kBool) : bytes({kBatch, kSk}, c.kv);
    call.config.padded_q = c.q;
    call.config.padded_kv = c.kv;
    // The lengths decide where the diagonal ends.
    if (c.type == MaskType::kPaddingCausalBottomRight) {
      for (int64_t b = 0; b < kBatch; ++b) {
        call.config.lengths_q.push_back(
            std::count(c.q.begin() + b * kSq, c.q.begin() + (b + 1) * kSq, 0));
        call.config.lengths_kv.push_back(
            std::count(c.kv.begin() + b * kSk, c.kv.begin() + (b + 1) * kSk, 0));
      }
    }
    call.expect_matches();
  }
}

const std::vector<uint8_t> kEndQ = {0, 0, 0, 1, 1, 0, 0, 0, 0, 0};
const std::vector<uint8_t> kEndKv = {0, 0, 0, 0, 1, 1, 0, 0, 1, 1, 1, 1};
const std::vector<uint8_t> kBeginQ = {1, 1, 0, 0, 0, 0, 0, 0, 0, 0};
const std::vector<uint8_t> kHolesKv = {1, 0, 0, 0, 1, 0, 0, 1, 0, 0, 0, 0};

INSTANTIATE_TEST_SUITE_P(
    All, PaddingMask,
    ::testing::Values(
        PaddingCase{"at_the_end", MaskType::kPadding, kEndQ, kEndKv},
        PaddingCase{"at_the_end_causal", MaskType::kPaddingCausal, kEndQ, kEndKv},
        PaddingCase{"at_the_end_bottom_right", MaskType::kPaddingCausalBottomRight, kEndQ, kEndKv},
        PaddingCase{"at_the_end_window", MaskType::kPadding, kEndQ, kEndKv, 1},
        PaddingCase{"anywhere_with_a_window", MaskType::kPadding, kBeginQ, kHolesKv, 1},
        PaddingCase{"anywhere", MaskType::kPadding, kBeginQ, kHolesKv},
        PaddingCase{"anywhere_causal", MaskType::kPaddingCausal, kBeginQ, kHolesKv},
        PaddingCase{"anywhere_window", MaskType::kPaddingCausal, kBeginQ, kHolesKv, 2}),
    [](const auto& info) { return info.param.name; });

TEST(PaddingMaskRules, OfQueriesCountsForKeysToo) {
  auto module = take(DotProductAttention::create(
      {.num_attention_heads = 1, .head_dim = 4, .attention = {.mask_type = MaskType::kPadding}}));
  const Tensor x = tensor({3, 1, 1, 4}, random_values(12, 1));
  AttentionInputs one, both;
  one.padding_mask_q = both.padding_mask_q = both.padding_mask_kv = bytes({1, 3}, {0, 0, 1});
  EXPECT_TRUE(same_bits(take(module->forward(x, x, x, nullptr, one)),
                        take(module->forward(x, x, x, nullptr, both))));
}

TEST(PaddingMaskRules, ResolvedOnceForManyLayers) {
  AttentionInputs inputs;
  inputs.padding_mask_q = bytes({2, 3}, {0, 0, 1, 0, 1, 1});
  const AttentionInputs ends = take(resolve_padding_masks(inputs, MaskType::kPadding));
  ASSERT_EQ(ends.cu_seqlens_q.numel(), 3);
  EXPECT_EQ(ends.cu_seqlens_kv.data<int32_t>()[1], 2);
  EXPECT_EQ(ends.cu_seqlens_kv.data<int32_t>()[2], 3);
  EXPECT_EQ(ends.mask_type, MaskType::kPadding);
  EXPECT_FALSE(ends.padding_mask_q.defined());
  inputs.padding_mask_q = bytes({2, 3}, {1, 0, 0, 0, 0, 0});
  const AttentionInputs anywhere = take(resolve_padding_masks(inputs, MaskType::kPaddingCausal));
  EXPECT_EQ(anywhere.mask_type, MaskType::kArbitrary);
  EXPECT_FALSE(anywhere.cu_seqlens_q.defined());
  ASSERT_EQ(anywhere.attn_mask.numel(), 18);
  const auto* masked = static_cast<const uint8_t*>(anywhere.attn_mask.raw_data());
  EXPECT_EQ(std::vector<uint8_t>(masked, masked + 18),
            std::vector<uint8_t>({1, 1, 1, 1, 0, 1, 1, 0, 0, 0, 1, 1, 0, 0, 1, 0, 0, 0}));
}

TEST(PaddingMaskRules, WhatDoesNotFitIsNamed) {
  const auto fails = [](const AttentionInputs& inputs, MaskType type, const char* what) {
    EXPECT_FAILS(resolve_padding_masks(inputs, type).status(), kInvalidArgument, what);
  };
  AttentionInputs inputs;
  inputs.padding_mask_q = bytes({1, 3}, {0, 0, 1});
  fails(inputs, MaskType::kCausal, "none of the padding ones");
  inputs.cu_seqlens_q = cu_seqlens({2});
  fails(inputs, MaskType::kPadding, "say the same thing");
  inputs.cu_seqlens_q = Tensor();
  inputs.padding_mask_kv = bytes({2, 3}, {0, 0, 0, 0, 0, 0});
  fails(inputs, MaskType::kPadding, "padding_mask_q has 1 sequences and padding_mask_kv 2");
  inputs.padding_mask_kv = tensor({1, 3}, {0, 0, 0});
  fails(inputs, MaskType::kPadding, "padding_mask_kv is f32[1,3]");
  inputs.padding_mask_kv = bytes({1, 3}, {1, 0, 0});
  fails(inputs, MaskType::kPaddingCausalBottomRight, "not at the ends");
  inputs.padding_mask_q = Tensor();
  fails(inputs, MaskType::kPadding, "without padding_mask_q");
  auto thd = take(DotProductAttention::create(
      {.num_attention_heads = 1,
       .head_dim = 4,
       .attention = {.layout = Layout::kTHD, .mask_type = MaskType::kPadding}}));
  const Tensor x = tensor({3, 1, 4}, random_values(12, 1));
  inputs = {};
  inputs.padding_mask_q = bytes({1, 3}, {0, 0, 1});
  EXPECT_FAILS(thd->forward(x, x, x, nullptr, inputs).status(), kInvalidArgument, "thd layout");
  auto dense = take(DotProductAttention::create(
      {.num_attention_heads = 1, .head_dim = 4, .attention = {.mask_type = MaskType::kPadding}}));
  const Tensor y = tensor({3, 1, 1, 4}, random_values(12, 1));
  inputs = {};
  inputs.attn_mask = bytes({1, 1, 1, 3}, {0, 0, 1});
  EXPECT_FAILS(dense->forward(y, y, y, nullptr, inputs).status(), kInvalidArgument,
               "attn_mask is given with kPadding");
}

}  // namespace
}  // namespace te_fl::nn::testing::attention_masks_test
