// The algorithms that are tried beside those of cuBLASLt's heuristic; needs CUDA's headers and no
// GPU.
#include "backends/cuda/gemm_space.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

namespace te_fl::cuda {
namespace {

// The library's check of an algorithm breaks on tiles that are none, so each must be one that it
// was seen to answer for (cuBLASLt 13.1, every cluster shape and custom option).
TEST(CudaGemmSpace, TilesAreThoseThatTheLibraryAnswersFor) {
  const std::set<int> answered{15, 16, 17, 18, 19, 20, 21,  22,  23,  24,  25,  26,  27,  28, 29,
                               30, 31, 32, 33, 34, 35, 165, 184, 197, 201, 209, 247, 248, 495};
  for (const int tile : kTiles) {
    EXPECT_TRUE(answered.count(tile) != 0) << tile;
    EXPECT_LT(tile, CUBLASLT_MATMUL_TILE_END);
  }
}

TEST(CudaGemmSpace, HoldsWhatWonUnderLoadAndNothingTwice) {
  EXPECT_EQ(std::set<int>(kTiles.begin(), kTiles.end()).size(), kTiles.size());
  EXPECT_EQ(std::set<int>(kClusters.begin(), kClusters.end()).size(), kClusters.size());
  // Tile and cluster of the fastest FP8 products of an H100 that the heuristic does not name.
  const int winners[][2] = {{29, 3}, {30, 5}, {201, 5}, {23, 3}, {29, 7}, {20, 9}, {209, 3}};
  for (const auto& [tile, cluster] : winners) {
    EXPECT_NE(std::find(kTiles.begin(), kTiles.end(), tile), kTiles.end()) << tile;
    EXPECT_NE(std::find(kClusters.begin(), kClusters.end(), cluster), kClusters.end()) << cluster;
  }
  for (const int cluster : kClusters) {
    EXPECT_NE(cluster, CUBLASLT_CLUSTER_SHAPE_AUTO);
    EXPECT_LT(cluster, CUBLASLT_CLUSTER_SHAPE_END);
  }
}

}  // namespace
}  // namespace te_fl::cuda
