// The kernel parameter that describes a quantised output.
#pragma once

#include <cfloat>

#include "common/element.cuh"
#include "common/mxfp8.hpp"
#include "te_fl/numeric/scaling.hpp"

namespace te_fl::cuda {

template <class T>
inline constexpr float kLargest = std::is_same_v<T, e4m3> ? 448.0f : 57344.0f;

struct Quantised {
  void* rows = nullptr;        // row-wise FP8 data [M, K]
  void* columns = nullptr;     // column-wise FP8 data [K, M]; MXFP8: [M, K]
  float* scale_inv = nullptr;  // MXFP8: points to bytes instead
  float* column_scale_inv = nullptr;
  float* amax = nullptr;
  float* scale = nullptr;         // used by per-tensor scaling
  const float* found = nullptr;   // current scaling: the amax that an earlier pass found
  float* running_amax = nullptr;  // the tile kernels raise it to the largest magnitude
  const float* noop = nullptr;    // the kernels write nothing if it is not NULL and *noop != 0
  int64_t m = 0, k = 0;
  uint32_t scaling = 0;
  bool pow2 = false, is_e5m2 = false;
  bool measure = false;  // first pass of current scaling: writes running_amax only
  float epsilon = 0, inf_scale = FLT_MAX;

  __device__ bool skip() const { return noop != nullptr && *noop != 0.0f; }
  __device__ float largest() const { return is_e5m2 ? kLargest<e5m2> : kLargest<e4m3>; }
  __device__ float tensor_scale() const {
    if (found == nullptr) return *scale;
    return numeric::scale_from_amax(*found, largest(), epsilon, pow2, FLT_MAX);
  }
  __device__ float block_scale(float block_amax) const {
    return numeric::scale_from_amax(block_amax, largest(), epsilon, pow2, inf_scale);
  }
  __device__ uint32_t mxfp8_scale(float block_amax) const {
    return mxfp8_code(__float_as_uint(fmaxf(block_amax, epsilon)), is_e5m2);
  }
  // Called by one thread of the launch.
  __device__ void write_tensor_scale(float value) const {
    if (measure) return;
    if (found != nullptr && amax != nullptr) *amax = *found;
    if (found != nullptr && scale != nullptr) *scale = value;
    if (scale_inv != nullptr) *scale_inv = 1.0f / value;
    if (column_scale_inv != nullptr) *column_scale_inv = 1.0f / value;
  }
  // Return the address of the inverse scale of a 128-element block: row_block() of the j-th block
  // of row `row`, column_block() of the i-th block of column `col`.
  __device__ float* row_block(int64_t row, int64_t j) const {
    return scale_inv + j * ((m + 3) / 4 * 4) + row;
  }
  __device__ float* column_block(int64_t i, int64_t col) const {
    return column_scale_inv + i * ((k + 3) / 4 * 4) + col;
  }
  __device__ float* square_block(int64_t i, int64_t j) const {
    return scale_inv + i * (((k + 127) / 128 + 3) / 4 * 4) + j;
  }
  __device__ float* column_square_block(int64_t i, int64_t j) const {
    return column_scale_inv + j * (((m + 127) / 128 + 3) / 4 * 4) + i;
  }
  // Return the address of an MXFP8 scale: mxfp8_row_block() of the j-th block of row `row`,
  // mxfp8_column_block() of the i-th block of column `col`.
  __device__ uint8_t* mxfp8_row_block(int64_t row, int64_t j) const {
    return reinterpret_cast<uint8_t*>(scale_inv) + row * mxfp8_row_pitch(k) + j;
  }
  __device__ uint8_t* mxfp8_column_block(int64_t i, int64_t col) const {
    return reinterpret_cast<uint8_t*>(column_scale_inv) + i * mxfp8_column_pitch(k) + col;
  }
};

// Returns the factor by which a block's elements are multiplied before conversion to FP8. `code`:
// the block's E8M0 scale.
__device__ inline float mxfp8_factor(uint32_t code) {
  return __uint_as_float(mxfp8_factor_bits(code));
}

}  // namespace te_fl::cuda
