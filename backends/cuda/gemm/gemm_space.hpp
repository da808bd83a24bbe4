// Variations of the algorithms that cuBLASLt's heuristic returns.
#pragma once

#include <cublasLt.h>

#include <array>
#include <string>
#include <vector>

namespace te_fl::cuda {

// The attribute values that are tried. With sustained sequences of FP8 products of 0.3 to 1.1
// tera-operations on an H100, every algorithm that won had values from these lists. Only these
// tiles may be passed to the library's check, because cuBLASLt 13.1 divides by zero for a tile that
// it does not know. The capabilities that the library reports for an algorithm do not tell which
// variations exist; its check does.
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

// Appends to `candidates` (the heuristic's algorithms) those that differ from them only in tile,
// cluster and custom option, and that the library accepts for the product. Appends none if the
// heuristic splits K or returns algorithms of older kinds, or if the library is older than the
// headers and may not know the tiles.
void add_variations(const LibraryProduct& product, std::vector<cublasLtMatmulAlgo_t>& candidates);

// Appends an algorithm unless the list contains it.
void add_new(std::vector<cublasLtMatmulAlgo_t>& list, const cublasLtMatmulAlgo_t& algo);

// "id 66 tile 29 stages 36 custom 1 inner 0 cluster 3 splitk 1", with the numbers of cublasLt.h.
std::string text_of(const cublasLtMatmulAlgo_t& algo);

}  // namespace te_fl::cuda
