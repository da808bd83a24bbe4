// The number of streams that a grouped GEMM uses. Needs no GPU.
#include "backends/cuda/gemm/grouped_gemm_choice.hpp"

#include <gtest/gtest.h>

namespace te_fl::cuda::grouped_gemm_choice_test {
namespace {

int lanes(int64_t count, int64_t m, int64_t n, int most = kGroupedStreams) {
  GroupSize group;
  for (int64_t i = 0; i < count; ++i) group.add(m, n);
  return choose_lanes(group, 132, most);
}

TEST(CudaGroupedGemmChoice, SmallProductsGoOverStreams) {
  EXPECT_EQ(lanes(64, 128, 1536), 4);
  EXPECT_EQ(lanes(8, 1024, 7168), 4);
  EXPECT_EQ(lanes(3, 128, 1536), 3);
  EXPECT_EQ(lanes(64, 128, 1536, 8), 8);
  EXPECT_EQ(lanes(64, 128, 1536, 1), 1);
}

TEST(CudaGroupedGemmChoice, OneProductOrManyWavesStayOnTheCallersStream) {
  EXPECT_EQ(lanes(0, 128, 1536), 1);
  EXPECT_EQ(lanes(1, 128, 1536), 1);
  EXPECT_EQ(lanes(8, 8192, 8192), 1);  // 4096 tiles per product
  EXPECT_EQ(lanes(8, 8192, 4096), 4);  // 2048 tiles per product: 15.5 waves
}

}  // namespace
}  // namespace te_fl::cuda::grouped_gemm_choice_test
