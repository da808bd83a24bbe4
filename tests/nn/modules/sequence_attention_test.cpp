// Attention to sequences that ranks divide, against attention on one rank: outputs and gradients.
// The ranks are threads.
#include <algorithm>
#include <cmath>

#include "parallel_fixture.hpp"
#include "support/expect.hpp"

namespace te_fl::nn::testing::sequence_attention_test {
namespace {

constexpr int64_t kTokens = 16, kBatch = 2, kHeads = 4, kGroups = 2, kSize = 8, kValueSize = 6;

DotProductAttentionOptions options_of(MaskType mask, int64_t window = -1) {
  DotProductAttentionOptions o{.num_attention_heads = kHeads,
                               .head_dim = kSize,
                               .num_gqa_groups = kGroups,
                               .value_head_dim = kValueSize};
  o.attention.mask_type = mask;
  o.attention.window_left = window;
  return o;
}

// A rank's rows of [tokens, ...]: chunks rank and 2 size - 1 - rank of 2 size.
Values rows_of(const Values& whole, int rank, int size) {
  const size_t chunk = whole.size() / static_cast<size_t>(2 * size);
  Values rows;
  for (const int number : {rank, 2 * size - 1 - rank}) {
    const auto begin = whole.begin() + static_cast<int64_t>(static_cast<size_t>(number) * chunk);
    rows.insert(rows.end(), begin, begin + static_cast<int64_t>(chunk));
  }
  return rows;
}

void expect_near(const Values& got, const Values& wanted, const std::string& what) {
  ASSERT_EQ(got.size(), wanted.size()) << what;
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_NEAR(got[i], wanted[i], 1e-5 * std::max(1.0, std::abs(wanted[i]))) << what << " " << i;
  }
}

void compare_with_one_rank(const DotProductAttentionOptions& options, int size) {
  const Values q = random_values(kTokens * kBatch * kHeads * kSize, 1);
  const Values k = random_values(kTokens * kBatch * kGroups * kSize, 2);
  const Values v = random_values(kTokens * kBatch * kGroups * kValueSize, 3);
  const Values d_o = random_values(kTokens * kBatch * kHeads * kValueSize, 4);
  const auto shaped = [](const Values& values, int64_t heads, int64_t width) {
    const auto tokens = static_cast<int64_t>(values.size()) / (kBatch * heads * width);
    return tensor({tokens, kBatch, heads, width}, values);
  };
  const auto one = take(DotProductAttention::create(options));
  Ctx whole;
  const Values o = values_of(take(one->forward(shaped(q, kHeads, kSize), shaped(k, kGroups, kSize),
                                               shaped(v, kGroups, kValueSize), &whole)));
  const auto wanted = take(one->backward(shaped(d_o, kHeads, kValueSize), whole));
  on_ranks(size, [&](const std::shared_ptr<const Comm>& ranks) {
    const auto own = [&](const Values& values) { return rows_of(values, ranks->rank(), size); };
    const auto part = take(SequenceAttention::create(options, ranks));
    for (int repeat = 0; repeat < 2; ++repeat) {
      Ctx ctx;
      const Tensor got =
          take(part->forward(shaped(own(q), kHeads, kSize), shaped(own(k), kGroups, kSize),
                             shaped(own(v), kGroups, kValueSize), &ctx));
      const auto grads = take(part->backward(shaped(own(d_o), kHeads, kValueSize), ctx));
      expect_near(values_of(got), own(o), "o");
      expect_near(values_of(grads.dq), own(values_of(wanted.dq)), "dq");
      expect_near(values_of(grads.dk), own(values_of(wanted.dk)), "dk");
      expect_near(values_of(grads.dv), own(values_of(wanted.dv)), "dv");
    }
  });
}

TEST(SequenceAttention, EqualsOneRank) {
  for (const int size : {1, 2, 4}) {
    compare_with_one_rank(options_of(MaskType::kCausal), size);
    compare_with_one_rank(options_of(MaskType::kNone), size);
    compare_with_one_rank(options_of(MaskType::kCausal, 3), size);
  }
}

TEST(SequenceAttention, Refusals) {
  on_ranks(2, [&](const std::shared_ptr<const Comm>& ranks) {
    const auto part = take(SequenceAttention::create(options_of(MaskType::kCausal), ranks));
    const auto shaped = [](int64_t tokens, int64_t heads, int64_t width) {
      return tensor({tokens, kBatch, heads, width},
                    random_values(tokens * kBatch * heads * width, 5));
    };
    const auto odd = part->forward(shaped(3, kHeads, kSize), shaped(3, kGroups, kSize),
                                   shaped(3, kGroups, kValueSize), nullptr);
    ASSERT_FALSE(odd.ok());
    EXPECT_NE(odd.status().message().find("pad the sequences to a multiple of 4"),
              std::string::npos)
        << odd.status().message();
    const auto longer = part->forward(shaped(4, kHeads, kSize), shaped(8, kGroups, kSize),
                                      shaped(8, kGroups, kValueSize), nullptr);
    ASSERT_FALSE(longer.ok());
    EXPECT_NE(longer.status().message().find("q has 4 tokens and k 8"), std::string::npos);
    EXPECT_FALSE(SequenceAttention::create(options_of(MaskType::kPadding), ranks).ok());
    EXPECT_FALSE(SequenceAttention::create(options_of(MaskType::kNone, 3), ranks).ok());
  });
  EXPECT_FALSE(SequenceAttention::create(options_of(MaskType::kCausal), nullptr).ok());
}

}  // namespace
}  // namespace te_fl::nn::testing::sequence_attention_test
