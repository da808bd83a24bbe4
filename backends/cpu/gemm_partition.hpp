// Divides a matrix product into blocks of C, and of the sum over k.
#pragma once

#include <cstdint>

namespace te_fl::cpu {

struct GemmPartition {
  int64_t row_blocks;
  int64_t column_blocks;
  int64_t k_blocks;

  int64_t blocks() const { return row_blocks * column_blocks * k_blocks; }
};

// A function of its arguments only. The product of m x k by k x n is divided into about `threads`
// blocks that cost the least together, fewer if it is too small to be worth waking threads for.
// All sizes are positive.
GemmPartition partition_gemm(int64_t m, int64_t n, int64_t k, int threads);

struct Range {
  int64_t begin;
  int64_t size;
};

// Range i of `size` elements divided into `blocks` ranges whose boundaries are multiples of `align`
// (but for the last). Ranges may be empty.
Range divide(int64_t size, int64_t blocks, int64_t align, int64_t i);

}  // namespace te_fl::cpu
