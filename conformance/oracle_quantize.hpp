#pragma once

// A straightforward implementation of the quantisation in docs/numerics.md: the positions of block
// scales and codes, the scale for an amax, and the exact bytes of a quantised tensor.

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "conformance/case.hpp"

namespace te_fl::conformance {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// The layout of the row-wise or column-wise data of a quantised [m, k] matrix. Blocks of block_m x
// block_k elements of the original matrix share a scale.
struct CopyLayout {
  int scaling;
  bool columnwise;
  int64_t m, k;
  int64_t block_m, block_k;
  int64_t scale_rows, scale_cols;
  int scale_dtype;

  CopyLayout(int mode, bool col, int64_t rows, int64_t cols)
      : scaling(mode), columnwise(col), m(rows), k(cols) {
    const int64_t length = mode == TE_FL_SCALING_MXFP8   ? 32
                           : mode == TE_FL_SCALING_NVFP4 ? 16
                                                         : 128;
    block_m = col ? length : 1;
    block_k = col ? 1 : length;
    scale_dtype = mode == TE_FL_SCALING_MXFP8   ? TE_FL_F8E8M0
                  : mode == TE_FL_SCALING_NVFP4 ? TE_FL_F8E4M3
                                                : TE_FL_F32;
    switch (mode) {
      case TE_FL_SCALING_BLOCK_1X128:
        scale_rows = ceil_div(col ? m : k, 128), scale_cols = round_up(col ? k : m, 4);
        break;
      case TE_FL_SCALING_BLOCK_128X128:
        block_m = block_k = 128;
        scale_rows = ceil_div(col ? k : m, 128),
        scale_cols = round_up(ceil_div(col ? m : k, 128), 4);
        break;
      case TE_FL_SCALING_MXFP8:
        scale_rows = col ? round_up(ceil_div(m, 32), 4) : round_up(m, 128);
        scale_cols = col ? round_up(k, 128) : round_up(ceil_div(k, 32), 4);
        break;
      case TE_FL_SCALING_NVFP4:
        scale_rows = round_up(col ? k : m, 128),
        scale_cols = round_up(ceil_div(col ? m : k, 16), 4);
        break;
      default:  // one scale for the tensor
        block_m = std::max<int64_t>(m, 1), block_k = std::max<int64_t>(k, 1);
        scale_rows = scale_cols = 1;
    }
  }
  int64_t blocks_m() const { return ceil_div(m, block_m); }
  int64_t blocks_k() const { return ceil_div(k, block_k); }
  int64_t scales() const { return scale_rows * scale_cols; }
  // The storage index of the scale of block (bm, bk).
  int64_t scale_index(int64_t bm, int64_t bk) const {
    switch (scaling) {
      case TE_FL_SCALING_BLOCK_1X128:
        return columnwise ? bm * scale_cols + bk : bk * scale_cols + bm;
      case TE_FL_SCALING_BLOCK_128X128:
      case TE_FL_SCALING_NVFP4:
        return columnwise ? bk * scale_cols + bm : bm * scale_cols + bk;
      case TE_FL_SCALING_MXFP8:
        return bm * scale_cols + bk;
      default:
        return 0;
    }
  }
  // The storage index of the code of element (i, j).
  int64_t data_index(int64_t i, int64_t j) const {
    return columnwise && scaling != TE_FL_SCALING_MXFP8 ? j * m + i : i * k + j;
  }
};

inline float amax_with(float amax, double x) {
  const float a = std::fabs(static_cast<float>(x));
  return a > amax ? a : amax;  // comparisons with NaN are false
}

inline float pow2_truncated(float x) { return bits_float(float_bits(x) & 0xff800000u); }

// "Scale from amax" in docs/numerics.md: for current scaling and FP32 block scaling.
inline float scale_from_amax(float amax, float fp8_max, float epsilon, bool pow2,
                             float instead_of_infinity) {
  if (amax < epsilon) amax = epsilon;
  if (amax == 0 || std::isinf(amax) || std::isnan(amax)) return 1.0f;
  float scale = fp8_max / amax;
  if (std::isinf(scale)) scale = instead_of_infinity;
  return pow2 ? pow2_truncated(scale) : scale;
}

// The E8M0 code of amax / fp8_max, rounded up to a power of two.
inline uint8_t e8m0_from_amax(float amax, float fp8_max) {
  const float x = amax / fp8_max;
  if (std::isnan(x)) return 0xff;
  if (std::isinf(x)) return 0xfe;
  if (x == 0) return 0;
  int exponent;
  const double fraction = std::frexp(static_cast<double>(x),
                                     &exponent);  // x = fraction * 2^exponent, fraction in [0.5, 1)
  const int up = fraction == 0.5 ? exponent - 1 : exponent;
  return static_cast<uint8_t>(std::clamp(up + 127, 0, 254));
}

// The two levels of NVFP4: the tensor's factor 6 * 448 / amax, and a block's E4M3 scale.
inline float nvfp4_global(float amax) {
  return scale_from_amax(amax, 6.0f * 448.0f, 0, false, std::numeric_limits<float>::max());
}
inline float nvfp4_block(float block_amax, float global) {
  return std::min(block_amax * (global * (1.0f / 6.0f)), 448.0f);
}

// The bytes of all arrays of a quantised tensor.
struct QuantImage {
  std::vector<uint8_t> data, col_data, scale_inv, col_scale_inv;
  float amax = 0, scale = 1;
};

inline uint8_t cast_code(int dtype, float x, float scale) {
  return static_cast<uint8_t>(encode_bits(format_of(dtype), static_cast<double>(x * scale)));
}

// Writes the row-wise or column-wise data of x [m, k] with the layout `at`. `scale` and `amax` are
// those of the complete tensor.
inline void quantise_copy(const std::vector<double>& x, const CopyLayout& at, const Spec& spec,
                          int input_dtype, float scale, float amax, std::vector<uint8_t>& data,
                          std::vector<uint8_t>& scale_inv) {
  data.assign(bytes_for(spec.dtype, at.m * at.k), 0);
  scale_inv.assign(bytes_for(at.scale_dtype, at.scales()), 0);
  const auto fp8_max = static_cast<float>(largest(spec.dtype));
  if (at.scaling == TE_FL_SCALING_TENSOR)
    store(TE_FL_F32, scale_inv.data(), 0, static_cast<double>(1.0f / scale));
  for (int64_t bm = 0; bm < at.blocks_m(); ++bm) {
    for (int64_t bk = 0; bk < at.blocks_k(); ++bk) {
      const int64_t i1 = std::min(at.m, (bm + 1) * at.block_m),
                    j1 = std::min(at.k, (bk + 1) * at.block_k);
      float block_amax = 0, factor = scale;
      for (int64_t i = bm * at.block_m; i < i1; ++i)
        for (int64_t j = bk * at.block_k; j < j1; ++j)
          block_amax = amax_with(block_amax, x[i * at.k + j]);
      const int64_t where = at.scale_index(bm, bk);
      if (at.scaling == TE_FL_SCALING_MXFP8) {
        const uint8_t code = e8m0_from_amax(std::max(block_amax, spec.epsilon), fp8_max);
        scale_inv[where] = code;
        factor = static_cast<float>(std::ldexp(1.0, 127 - code));
      } else if (at.scaling == TE_FL_SCALING_NVFP4) {
        const float global = nvfp4_global(amax);
        store(TE_FL_F8E4M3, scale_inv.data(), where,
              static_cast<double>(nvfp4_block(block_amax, global)));
        const auto block = static_cast<float>(load(TE_FL_F8E4M3, scale_inv.data(), where));
        const float reciprocal = 1.0f / (block * (1.0f / global));
        factor = block == 0 ? 0 : std::min(reciprocal, std::numeric_limits<float>::max());
      } else if (at.scaling != TE_FL_SCALING_TENSOR) {
        factor = scale_from_amax(block_amax, fp8_max, spec.epsilon, spec.pow2(),
                                 static_cast<float>(largest(input_dtype)));
        store(TE_FL_F32, scale_inv.data(), where, static_cast<double>(1.0f / factor));
      }
      for (int64_t i = bm * at.block_m; i < i1; ++i) {
        for (int64_t j = bk * at.block_k; j < j1; ++j) {
          const float v = static_cast<float>(x[i * at.k + j]) * factor;
          store(spec.dtype, data.data(), at.data_index(i, j), static_cast<double>(v));
        }
      }
    }
  }
}

inline QuantImage quantise_exact(const std::vector<double>& x, int64_t m, int64_t k,
                                 const Spec& spec, int input_dtype) {
  QuantImage image;
  float amax = 0;
  for (double v : x) amax = amax_with(amax, v);
  const bool delayed = spec.scaling == TE_FL_SCALING_TENSOR && !spec.current();
  image.amax = delayed ? std::max(spec.amax_before, amax) : amax;
  image.scale = delayed
                    ? spec.scale
                    : scale_from_amax(amax, static_cast<float>(largest(spec.dtype)), spec.epsilon,
                                      spec.pow2(), std::numeric_limits<float>::max());
  if (spec.row)
    quantise_copy(x, CopyLayout(spec.scaling, false, m, k), spec, input_dtype, image.scale, amax,
                  image.data, image.scale_inv);
  if (spec.col)
    quantise_copy(x, CopyLayout(spec.scaling, true, m, k), spec, input_dtype, image.scale, amax,
                  image.col_data, image.col_scale_inv);
  return image;
}

// Dequantises the row-wise or column-wise data of a tensor. Returns the elements in logical order.
inline std::vector<double> dequantised(const Tensor& t, bool columnwise) {
  const CopyLayout at(t.spec.scaling, columnwise, t.rows(), t.cols());
  const Buffer& data = columnwise ? *t.col_data : *t.data;
  const Buffer& scales =
      columnwise && t.spec.scaling != TE_FL_SCALING_TENSOR ? *t.col_scale_inv : *t.scale_inv;
  std::vector<double> x(static_cast<size_t>(at.m * at.k));
  double global = 1;
  if (t.spec.scaling == TE_FL_SCALING_NVFP4)
    global = load(TE_FL_F32, t.amax->data(), 0) / (6.0 * 448.0);
  const bool strided = !columnwise && !t.strides.empty();
  for (int64_t i = 0; i < at.m; ++i)
    for (int64_t j = 0; j < at.k; ++j)
      x[i * at.k + j] =
          load(t.spec.dtype, data.data(), strided ? t.index(i * at.k + j) : at.data_index(i, j)) *
          global *
          load(at.scale_dtype, scales.data(), at.scale_index(i / at.block_m, j / at.block_k));
  return x;
}
inline std::vector<double> dequantised(const Tensor& t) {
  return t.spec.quantised() ? dequantised(t, !t.spec.row) : t.values();
}

}  // namespace te_fl::conformance
