// The GEMM algorithms that are tried in addition to those of cuBLASLt's heuristic. Needs CUDA's
// headers, but no GPU and no cuBLASLt, which this file replaces with a fake.
#include "backends/cuda/gemm/gemm_space.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <tuple>

#include "backends/cuda/gemm/cublaslt.hpp"

namespace te_fl::cuda {
namespace {

// ---- fake cuBLASLt: stores an algorithm's attributes in the data words of cublasLtMatmulAlgo_t;
// the test sets the results of its checks

struct Answers {
  std::set<int> asked{};     // tiles that were checked
  size_t workspace = 0;      // workspace size that algorithms with cluster shape 1x2 need
  int accepted_option = -1;  // the only custom option that the check accepts; -1: any
};
Answers g_answers;
CublasLt g_library;

size_t bytes_of(cublasLtMatmulAlgoConfigAttributes_t attribute) {
  return attribute == CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID ||
                 attribute == CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID
             ? 2
             : 4;
}
unsigned char* place(cublasLtMatmulAlgo_t& algo, cublasLtMatmulAlgoConfigAttributes_t attribute) {
  return reinterpret_cast<unsigned char*>(&algo) + 4 * static_cast<size_t>(attribute);
}
cublasStatus_t algo_set(cublasLtMatmulAlgo_t* algo, cublasLtMatmulAlgoConfigAttributes_t attribute,
                        const void* from, size_t bytes) {
  if (bytes != bytes_of(attribute)) return CUBLAS_STATUS_INVALID_VALUE;
  std::memcpy(place(*algo, attribute), from, bytes);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t algo_get(const cublasLtMatmulAlgo_t* algo,
                        cublasLtMatmulAlgoConfigAttributes_t attribute, void* to, size_t bytes,
                        size_t* written) {
  if (bytes != bytes_of(attribute)) return CUBLAS_STATUS_INVALID_VALUE;
  auto copy = *algo;
  std::memcpy(to, place(copy, attribute), bytes);
  *written = bytes;
  return CUBLAS_STATUS_SUCCESS;
}
int config(const cublasLtMatmulAlgo_t& algo, cublasLtMatmulAlgoConfigAttributes_t attribute) {
  int value = 0;
  size_t written = 0;
  algo_get(&algo, attribute, &value, bytes_of(attribute), &written);
  return value;
}
cublasStatus_t algo_check(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t,
                          cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                          const cublasLtMatmulAlgo_t* algo,
                          cublasLtMatmulHeuristicResult_t* result) {
  g_answers.asked.insert(config(*algo, CUBLASLT_ALGO_CONFIG_TILE_ID));
  const bool wide = config(*algo, CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID) == 5;
  result->workspaceSize = wide ? g_answers.workspace : 0;
  const int option = config(*algo, CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION);
  return g_answers.accepted_option < 0 || option == g_answers.accepted_option
             ? CUBLAS_STATUS_SUCCESS
             : CUBLAS_STATUS_NOT_SUPPORTED;
}

cublasLtMatmulAlgo_t algorithm(int tile, int cluster, int option, int stages = 36,
                               int split_k = 1) {
  cublasLtMatmulAlgo_t algo{};
  const std::map<cublasLtMatmulAlgoConfigAttributes_t, int> all{
      {CUBLASLT_ALGO_CONFIG_ID, 66},
      {CUBLASLT_ALGO_CONFIG_TILE_ID, tile},
      {CUBLASLT_ALGO_CONFIG_STAGES_ID, stages},
      {CUBLASLT_ALGO_CONFIG_SPLITK_NUM, split_k},
      {CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION, option},
      {CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID, cluster}};
  for (const auto& [attribute, value] : all) {
    algo_set(&algo, attribute, &value, bytes_of(attribute));
  }
  return algo;
}

// Returns the algorithms that add_variations() derives from the heuristic's.
std::vector<cublasLtMatmulAlgo_t> varied(std::vector<cublasLtMatmulAlgo_t> heuristic,
                                         const Answers& answers = {}, size_t version = 130100) {
  g_answers = answers;
  g_library.number = version;
  g_library.algo_set = algo_set;
  g_library.algo_get = algo_get;
  g_library.algo_check = algo_check;
  LibraryProduct product{};
  product.workspace = 1 << 20;
  add_variations(product, heuristic);
  return heuristic;
}
constexpr size_t kAll = kTiles.size() * kClusters.size() * kCustomOptions;

}  // namespace

const CublasLt* cublaslt() noexcept { return &g_library; }

namespace {

// cuBLASLt crashes on a check of an invalid tile, so only tiles are tried for which the check is
// known to return (cuBLASLt 13.1, every cluster shape and custom option).
TEST(CudaGemmSpace, TilesAreThoseThatTheLibraryAnswersFor) {
  const std::set<int> answered{15, 16, 17, 18, 19, 20, 21,  22,  23,  24,  25,  26,  27,  28, 29,
                               30, 31, 32, 33, 34, 35, 165, 184, 197, 201, 209, 247, 248, 495};
  for (const int tile : kTiles) {
    EXPECT_TRUE(answered.count(tile) != 0) << tile;
    EXPECT_LT(tile, CUBLASLT_MATMUL_TILE_END);
  }
  EXPECT_EQ(varied({algorithm(23, 3, 4)}).size(), kAll);
  EXPECT_EQ(g_answers.asked, std::set<int>(kTiles.begin(), kTiles.end()));
}

TEST(CudaGemmSpace, HoldsWhatWonUnderLoadAndNothingTwice) {
  EXPECT_EQ(std::set<int>(kTiles.begin(), kTiles.end()).size(), kTiles.size());
  EXPECT_EQ(std::set<int>(kClusters.begin(), kClusters.end()).size(), kClusters.size());
  // Tile, cluster and option of the fastest FP8 GEMMs on an H100 that the heuristic does not
  // propose.
  const int winners[][3] = {{29, 3, 1}, {30, 5, 6}, {201, 5, 6}, {23, 3, 5}, {20, 5, 6}};
  const auto all = varied({algorithm(23, 3, 4)});
  for (const auto& [tile, cluster, option] : winners) {
    const auto wanted = algorithm(tile, cluster, option);
    EXPECT_EQ(std::count_if(all.begin(), all.end(),
                            [&](const cublasLtMatmulAlgo_t& algo) {
                              return std::memcmp(&algo, &wanted, sizeof algo) == 0;
                            }),
              1)
        << to_text(wanted);
  }
}

TEST(CudaGemmSpace, KeepsWhatTheHeuristicNamesInFront) {
  const auto first = algorithm(24, 5, 7), second = algorithm(31, 5, 7);
  const auto all = varied({first, second});
  ASSERT_EQ(all.size(), kAll + 1) << "31 is no tile of the list, 24 is not repeated";
  EXPECT_EQ(std::memcmp(&all[0], &first, sizeof first), 0);
  EXPECT_EQ(std::memcmp(&all[1], &second, sizeof second), 0);
}

TEST(CudaGemmSpace, TakesWhatTheLibraryAcceptsAndTheScratchAllows) {
  const auto one = algorithm(31, 2, 4);
  EXPECT_EQ(varied({one}, {.accepted_option = 1}).size(), 1 + kAll / kCustomOptions);
  EXPECT_EQ(varied({one}, {.workspace = 2 << 20}).size(), 1 + kAll / 2);
  EXPECT_EQ(varied({one}, {.accepted_option = 9}).size(), 1u);
}

TEST(CudaGemmSpace, EveryKindOfTheHeuristicIsVaried) {
  EXPECT_EQ(varied({algorithm(31, 2, 4, 36), algorithm(31, 2, 5, 36)}).size(), 2 + kAll);
  EXPECT_EQ(varied({algorithm(31, 2, 4, 36), algorithm(31, 2, 4, 35)}).size(), 2 + 2 * kAll);
}

TEST(CudaGemmSpace, AsksNothingWhereTheListMayNotHold) {
  for (const auto& all : {varied({algorithm(23, 3, 4, 36, 2)}),
                          varied({algorithm(23, 3, 4)}, {}, 130099), varied({})}) {
    EXPECT_LE(all.size(), 1u);
    EXPECT_TRUE(g_answers.asked.empty());
  }
}

TEST(CudaGemmSpace, SaysAnAlgorithmInNumbers) {
  EXPECT_EQ(to_text(algorithm(29, 3, 1)),
            "id 66 tile 29 stages 36 custom 1 inner 0 cluster 3 splitk 1");
}

}  // namespace
}  // namespace te_fl::cuda
