#include "scaling.hpp"

namespace te_fl::reference {

Extents block_extents(uint32_t scaling, bool columnwise) noexcept {
  int64_t length = 1;
  switch (scaling) {
    case TE_FL_SCALING_BLOCK_128X128:
      return {128, 128};
    case TE_FL_SCALING_BLOCK_1X128:
      length = 128;
      break;
    case TE_FL_SCALING_MXFP8:
      length = 32;
      break;
    case TE_FL_SCALING_NVFP4:
      length = 16;
      break;
    default:
      break;
  }
  return columnwise ? Extents{length, 1} : Extents{1, length};
}

Extents scale_extents(uint32_t scaling, bool columnwise, backend::Matrix matrix) noexcept {
  // In every mode except MXFP8, the column-wise data is the transposed matrix.
  const bool transposed = columnwise && scaling != TE_FL_SCALING_MXFP8;
  const int64_t m = transposed ? matrix.cols : matrix.rows;
  const int64_t k = transposed ? matrix.rows : matrix.cols;
  switch (scaling) {
    case TE_FL_SCALING_BLOCK_1X128:
      return {ceil_div(k, 128), round_up(m, 4)};
    case TE_FL_SCALING_BLOCK_128X128:
      return {ceil_div(m, 128), round_up(ceil_div(k, 128), 4)};
    case TE_FL_SCALING_MXFP8:
      return columnwise ? Extents{round_up(ceil_div(m, 32), 4), round_up(k, 128)}
                        : Extents{round_up(m, 128), round_up(ceil_div(k, 32), 4)};
    case TE_FL_SCALING_NVFP4:
      return {round_up(m, 128), round_up(ceil_div(k, 16), 4)};
    default:
      return {1, 1};
  }
}

int64_t scale_index(uint32_t scaling, bool columnwise, backend::Matrix matrix, int64_t row,
                    int64_t col) noexcept {
  const int64_t pitch = scale_extents(scaling, columnwise, matrix).cols;
  const bool transposed = columnwise && scaling != TE_FL_SCALING_MXFP8;
  const int64_t m = transposed ? col : row;
  const int64_t k = transposed ? row : col;
  switch (scaling) {
    case TE_FL_SCALING_BLOCK_1X128:
      return k / 128 * pitch + m;
    case TE_FL_SCALING_BLOCK_128X128:
      return m / 128 * pitch + k / 128;
    case TE_FL_SCALING_MXFP8:
      return columnwise ? m / 32 * pitch + k : m * pitch + k / 32;
    case TE_FL_SCALING_NVFP4:
      return m * pitch + k / 16;
    default:
      return 0;
  }
}

}  // namespace te_fl::reference
