// Tests how the router divides tokens among threads. Needs no GPU.
#include "backends/cuda/moe/router_choice.hpp"

#include <gtest/gtest.h>

namespace te_fl::cuda::router_choice_test {
namespace {

void expect_choice(int64_t experts, int lanes, int each) {
  const RouterChoice choice = choose_router(experts);
  EXPECT_EQ(choice.lanes, lanes) << experts;
  EXPECT_EQ(choice.experts, each) << experts;
}

TEST(CudaRouterChoice, ATokenHasTheFewestLanesThatHoldItsExperts) {
  expect_choice(0, 1, 8);
  expect_choice(8, 1, 8);
  expect_choice(9, 2, 8);
  expect_choice(32, 4, 8);
  expect_choice(33, 8, 8);
  expect_choice(128, 16, 8);
  expect_choice(129, 32, 8);
  expect_choice(256, 32, 8);
}

TEST(CudaRouterChoice, LanesOfAWarpHoldMoreExperts) {
  expect_choice(257, 32, 16);
  expect_choice(512, 32, 16);
  expect_choice(513, 32, 32);
  expect_choice(1024, 32, 32);
}

TEST(CudaRouterChoice, BlocksCoverTheTokensUpToThirtyTwoPerMultiprocessor) {
  EXPECT_EQ(router_blocks(choose_router(8), 1, 132), 1);
  EXPECT_EQ(router_blocks(choose_router(8), 257, 132), 2);     // 256 tokens of a lane each
  EXPECT_EQ(router_blocks(choose_router(256), 257, 132), 33);  // 8 tokens of a warp each
  EXPECT_EQ(router_blocks(choose_router(256), 1 << 20, 132), 32 * 132);
  EXPECT_EQ(router_blocks(choose_router(256), 1 << 20, 4), 32 * 4);
}

TEST(CudaRouterChoice, IsDescribed) {
  EXPECT_EQ(choose_router(4).text(), "1 lane of 8 experts for a token");
  EXPECT_EQ(choose_router(300).text(), "32 lanes of 16 experts for a token");
}

}  // namespace
}  // namespace te_fl::cuda::router_choice_test
