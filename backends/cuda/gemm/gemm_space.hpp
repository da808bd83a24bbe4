// Variations of the algorithms that cuBLASLt's heuristic returns.
#pragma once

#include <cublasLt.h>

#include <array>
#include <string>
#include <vector>

namespace te_fl::cuda {

// The attribute values that are tried. In sustained sequences of FP8 GEMMs of 0.3 to 1.1
// tera-operations on an H100, the fastest algorithm always had values from these lists. Only these
// tiles may be passed to cublasLtMatmulAlgoCheck(), because cuBLASLt 13.1 divides by zero for an
// unknown tile. The check is needed because the capabilities that cuBLASLt reports for an algorithm
// do not show which combinations are supported.
inline constexpr std::array kTiles{
    CUBLASLT_MATMUL_TILE_128x128, CUBLASLT_MATMUL_TILE_128x256, CUBLASLT_MATMUL_TILE_256x128,
    CUBLASLT_MATMUL_TILE_128x160, CUBLASLT_MATMUL_TILE_160x128, CUBLASLT_MATMUL_TILE_128x192,
    CUBLASLT_MATMUL_TILE_144x128, CUBLASLT_MATMUL_TILE_168x128, CUBLASLT_MATMUL_TILE_176x128,
    CUBLASLT_MATMUL_TILE_192x192, CUBLASLT_MATMUL_TILE_320x128, CUBLASLT_MATMUL_TILE_256x96};
inline constexpr std::array kClusters{CUBLASLT_CLUSTER_SHAPE_2x1x1, CUBLASLT_CLUSTER_SHAPE_1x2x1};
inline constexpr size_t kOldestWithTiles = 130100;  // first cublasLtGetVersion() whose library
                                                    // knows these tiles
inline constexpr int kCustomOptions = 8;            // 0 to 7: scheduling of the library's tiles

// A matrix product as it is passed to the library's check.
struct LibraryProduct {
  cublasLtHandle_t handle;
  cublasLtMatmulDesc_t desc;
  cublasLtMatrixLayout_t left, right, added, out;
  size_t workspace;  // bytes that an algorithm may use
};

// Appends variations to `candidates`, which holds the heuristic's algorithms: algorithms that
// differ from one of them only in tile, cluster and custom option, and that cuBLASLt accepts for
// the GEMM. Appends none if the heuristic splits K or returns algorithms of older kinds, or if the
// library is older than kOldestWithTiles.
void add_variations(const LibraryProduct& product, std::vector<cublasLtMatmulAlgo_t>& candidates);

// Appends an algorithm unless the list contains it.
void add_new(std::vector<cublasLtMatmulAlgo_t>& list, const cublasLtMatmulAlgo_t& algo);

// "id 66 tile 29 stages 36 custom 1 inner 0 cluster 3 splitk 1", with the numbers of cublasLt.h.
std::string to_text(const cublasLtMatmulAlgo_t& algo);

}  // namespace te_fl::cuda
