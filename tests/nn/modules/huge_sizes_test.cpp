// Sizes whose memory cannot be allocated give an ordinary error.
#include "nn_test_util.hpp"

namespace te_fl::nn::testing::huge_sizes_test {
namespace {

constexpr int64_t kVast = int64_t{1} << 50;

TEST(HugeSizes, OfParametersAreRefusedWithAStatus) {
  EXPECT_EQ(Linear::create({.in_features = kVast, .out_features = 256}).status().code(),
            StatusCode::kOutOfMemory);
  EXPECT_EQ(LayerNorm::create({.hidden_size = kVast}).status().code(), StatusCode::kOutOfMemory);
  // The number of elements exceeds what a vector can count.
  EXPECT_FALSE(Embedding::create({.num_embeddings = kVast, .hidden_size = 1 << 12}).ok());
  EXPECT_FALSE(Embedding::create({.num_embeddings = kVast, .hidden_size = kVast}).ok());
}

TEST(HugeSizes, OfAnglesAreRefusedWithAStatus) {
  EXPECT_EQ(init::rotary_angles({.dim = 64, .max_seqlen = kVast}).status().code(),
            StatusCode::kOutOfMemory);
  // The product of the sizes overflows to 0 modulo 2^64.
  EXPECT_EQ(init::rotary_angles({.dim = kVast, .max_seqlen = kVast}).status().code(),
            StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace te_fl::nn::testing::huge_sizes_test
