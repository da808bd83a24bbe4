// Divides a matrix product into blocks of rows and columns of C and ranges of k.
#pragma once

#include <cstdint>

namespace te_fl::cpu {

struct GemmPartition {
  int64_t row_blocks;
  int64_t column_blocks;
  int64_t k_blocks;

  int64_t blocks() const { return row_blocks * column_blocks * k_blocks; }
};

// Divides the product of m x k by k x n into about `threads` blocks with the least cost, or fewer
// if the product is too small to wake threads. Depends only on its arguments. All sizes must be
// positive.
GemmPartition partition_gemm(int64_t m, int64_t n, int64_t k, int threads);

struct Range {
  int64_t begin;
  int64_t size;
};

// Range i when `size` elements are divided into `blocks` ranges. Range boundaries are multiples of
// `align`, except the last. Ranges may be empty.
Range divide(int64_t size, int64_t blocks, int64_t align, int64_t i);

}  // namespace te_fl::cpu
