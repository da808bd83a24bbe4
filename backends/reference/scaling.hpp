// Layout of the data and scales of a quantised tensor (te_fl_quant in te_fl/plugin.h).
#pragma once

#include <cstdint>

#include "te_fl/backend.hpp"

namespace te_fl::reference {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

struct Extents {
  int64_t rows;
  int64_t cols;
};

// Extents of the block of the logical matrix that shares one scale (not for TENSOR).
Extents block_extents(uint32_t scaling, bool columnwise) noexcept;

// Shape of scale_inv of a [rows, cols] matrix, including padding.
Extents scale_extents(uint32_t scaling, bool columnwise, backend::Matrix matrix) noexcept;

// Index in scale_inv of the scale of element (row, col).
int64_t scale_index(uint32_t scaling, bool columnwise, backend::Matrix matrix, int64_t row,
                    int64_t col) noexcept;

// Index of element (row, col) in the column-wise data.
constexpr int64_t columnwise_index(uint32_t scaling, backend::Matrix matrix, int64_t row,
                                   int64_t col) {
  return scaling == TE_FL_SCALING_MXFP8 ? row * matrix.cols + col : col * matrix.rows + row;
}

}  // namespace te_fl::reference
