// Tests how MoE rows are divided among lanes and kernels. Needs no GPU.
#include "backends/cuda/moe/row_choice.hpp"

#include <gtest/gtest.h>

#include "metadata_tensor.hpp"

namespace te_fl::cuda::row_choice_test {
namespace {

TEST(CudaRowChoice, ARowHasTheFewestLanesThatHoldIt) {
  for (const int64_t pieces : {1, 3, 4}) {
    EXPECT_EQ(choose_row_cut(pieces).lanes_log2, 0) << pieces;
    EXPECT_EQ(choose_row_cut(pieces).parts, 1) << pieces;
  }
  EXPECT_EQ(choose_row_cut(5).lanes_log2, 1);
  EXPECT_EQ(choose_row_cut(64).lanes_log2, 4);
  EXPECT_EQ(choose_row_cut(65).lanes_log2, 5);
  EXPECT_EQ(choose_row_cut(128).parts, 1);
}

TEST(CudaRowChoice, LongRowsAreCutIntoPartsOfAWarp) {
  // 4096 columns of BF16 are 512 packs of 16 bytes.
  EXPECT_EQ(choose_row_cut(512).lanes_log2, 5);
  EXPECT_EQ(choose_row_cut(512).parts, 4);
  EXPECT_EQ(choose_row_cut(513).parts, 5);
  EXPECT_EQ(choose_row_cut((int64_t{1} << 31) - 1).parts, int64_t{1} << 24);
}

TEST(CudaRowChoice, ShortRowsOfFewPlacesAreNotListed) {
  EXPECT_FALSE(lists_rows(2, 63));
  EXPECT_FALSE(lists_rows(8, 1));
  EXPECT_TRUE(lists_rows(9, 1));
  EXPECT_TRUE(lists_rows(1, 64));
  EXPECT_TRUE(lists_rows(4096, 8));
}

RowChoice sum_of(int64_t each, int64_t cols, int dtype, uint64_t offset = 0) {
  const MetadataTensor input(dtype, {64, cols}, offset), map(TE_FL_I32, {each, 32}),
      output(dtype, {32, cols});
  return choose_row_sum(input.t, map.t, output.t);
}

TEST(CudaRowChoice, SumsOfRows) {
  EXPECT_EQ(sum_of(2, 63 * 4, TE_FL_F32).kernel, RowChoice::kSum);
  EXPECT_EQ(sum_of(2, 64 * 4, TE_FL_F32).text(), "sum_listed_rows: long rows");
  EXPECT_EQ(sum_of(2, 64 * 4, TE_FL_BF16).text(),
            "sum_rows: short rows, and up to 8 map entries of a token");
  EXPECT_EQ(sum_of(9, 8, TE_FL_BF16).text(), "sum_listed_rows: more than 8 map entries of a token");
  EXPECT_TRUE(sum_of(2, 8, TE_FL_BF16).whole);
  EXPECT_FALSE(sum_of(2, 7, TE_FL_BF16).whole);
  EXPECT_FALSE(sum_of(2, 8, TE_FL_BF16, 2).whole);
  EXPECT_EQ(sum_of(2, 65, TE_FL_BF16).kernel, RowChoice::kSumListed) << "pieces of one element";
}

TEST(CudaRowChoice, GradientsOfRows) {
  const MetadataTensor grad(TE_FL_F32, {32, 8}), input(TE_FL_F32, {64, 8}), few(TE_FL_I32, {8, 32}),
      many(TE_FL_I32, {9, 32}), probs(TE_FL_F32, {32, 8}), out(TE_FL_F32, {64, 8});
  te_fl_moe_unpermute_bwd_args a;
  a.grad_output = &grad.t, a.fwd_input = &input.t, a.row_id_map = &few.t, a.grad_input = &out.t;
  EXPECT_EQ(choose_row_gradient(a).text(),
            "scatter_rows: rows are copied, as there are no probabilities");
  a.probs = &probs.t;
  EXPECT_EQ(choose_row_gradient(a).text(), "few_rows_gradient: up to 8 map entries of a token");
  a.row_id_map = &many.t;
  EXPECT_EQ(choose_row_gradient(a).text(),
            "unpermute_gradient: more than 8 map entries of a token");
  EXPECT_TRUE(choose_row_gradient(a).whole);
}

}  // namespace
}  // namespace te_fl::cuda::row_choice_test
