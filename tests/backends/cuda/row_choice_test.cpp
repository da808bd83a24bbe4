// Tests how MoE rows are divided among lanes and kernels. Needs no GPU.
#include "backends/cuda/moe/row_choice.hpp"

#include <gtest/gtest.h>

namespace te_fl::cuda::row_choice_test {
namespace {

TEST(CudaRowChoice, ARowHasTheFewestLanesThatHoldIt) {
  for (const int64_t pieces : {1, 3, 4}) {
    EXPECT_EQ(cut_of(pieces).lanes_log2, 0) << pieces;
    EXPECT_EQ(cut_of(pieces).parts, 1) << pieces;
  }
  EXPECT_EQ(cut_of(5).lanes_log2, 1);
  EXPECT_EQ(cut_of(64).lanes_log2, 4);
  EXPECT_EQ(cut_of(65).lanes_log2, 5);
  EXPECT_EQ(cut_of(128).parts, 1);
}

TEST(CudaRowChoice, LongRowsAreCutIntoPartsOfAWarp) {
  // 4096 columns of BF16 are 512 packs of 16 bytes.
  EXPECT_EQ(cut_of(512).lanes_log2, 5);
  EXPECT_EQ(cut_of(512).parts, 4);
  EXPECT_EQ(cut_of(513).parts, 5);
  EXPECT_EQ(cut_of((int64_t{1} << 31) - 1).parts, int64_t{1} << 24);
}

TEST(CudaRowChoice, ShortRowsOfFewPlacesAreNotListed) {
  EXPECT_FALSE(lists_rows(2, 63));
  EXPECT_FALSE(lists_rows(8, 1));
  EXPECT_TRUE(lists_rows(9, 1));
  EXPECT_TRUE(lists_rows(1, 64));
  EXPECT_TRUE(lists_rows(4096, 8));
}

}  // namespace
}  // namespace te_fl::cuda::row_choice_test
