// The algorithms of cuBLASLt around those that its heuristic names.
#pragma once

#include <cublasLt.h>

#include <array>
#include <string>
#include <vector>

namespace te_fl::cuda {

// The values that are varied: with sustained sequences of FP8 products of 0.3 to 1.1
// tera-operations on an H100, every algorithm that won had one of each of these. Only tiles that
// are named here may be asked about: the library's check divides by zero where it knows no such
// tile (13.1). What it says that an algorithm of the heuristic's is capable of does not tell which
// exist; its check does.
inline constexpr std::array kTiles{
    CUBLASLT_MATMUL_TILE_128x128, CUBLASLT_MATMUL_TILE_128x256, CUBLASLT_MATMUL_TILE_256x128,
    CUBLASLT_MATMUL_TILE_128x160, CUBLASLT_MATMUL_TILE_160x128, CUBLASLT_MATMUL_TILE_128x192,
    CUBLASLT_MATMUL_TILE_144x128, CUBLASLT_MATMUL_TILE_168x128, CUBLASLT_MATMUL_TILE_176x128,
    CUBLASLT_MATMUL_TILE_192x192, CUBLASLT_MATMUL_TILE_320x128, CUBLASLT_MATMUL_TILE_256x96};
inline constexpr std::array kClusters{CUBLASLT_CLUSTER_SHAPE_2x1x1, CUBLASLT_CLUSTER_SHAPE_1x2x1};
inline constexpr size_t kOldestWithTiles = 130100;  // cublasLtGetVersion() of that library
inline constexpr int kCustomOptions = 8;            // 0 to 7: how the library's tiles are scheduled

// A matrix product as the library is asked about it.
struct LibraryProduct {
  cublasLtHandle_t handle;
  cublasLtMatmulDesc_t desc;
  cublasLtMatrixLayout_t left, right, added, out;
  size_t workspace;  // bytes that an algorithm may take
};

// Appends the algorithms that differ from those of the heuristic, in `candidates`, in tile, cluster
// and custom option only, and that the library accepts for the product. None where the heuristic
// divides K or names algorithms of older kinds, and with a library older than the headers, which
// may not know the tiles.
void add_variations(const LibraryProduct& product, std::vector<cublasLtMatmulAlgo_t>& candidates);

// Appends an algorithm that is not in the list.
void add_new(std::vector<cublasLtMatmulAlgo_t>& list, const cublasLtMatmulAlgo_t& algo);

// "id 66 tile 29 stages 36 custom 1 inner 0 cluster 3 splitk 1", the numbers of cublasLt.h.
std::string text_of(const cublasLtMatmulAlgo_t& algo);

}  // namespace te_fl::cuda
