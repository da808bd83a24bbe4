// Reads operands of generic_gemm as FP32 values, and converts operands that cuBLASLt cannot read
// into scratch.
#pragma once

#include "common/store.cuh"
#include "gemm/gemm_plan.hpp"

namespace te_fl::cuda {

static __global__ void pad_kernel(const uint8_t* in, int64_t rows, int64_t cols, uint8_t* out,
                                  int64_t out_rows, int64_t out_cols) {
  const int64_t n = out_rows * out_cols, step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n; i += step) {
    const int64_t row = i / out_cols, col = i - row * out_cols;
    out[i] = row < rows && col < cols ? in[row * cols + col] : 0;
  }
}

// An operand, quantised or not, as FP32 values; [rows, cols] as stored.
struct Values {
  Source data;
  const float* scale_inv = nullptr;
  uint32_t scaling = TE_FL_SCALING_NONE;
  int64_t rows = 0, cols = 0;
  bool columnwise = false;  // `data` and `scale_inv` are column-wise
  // The column-wise copy is stored as [cols, rows]. MXFP8 stores it as [rows, cols].
  bool transposed = false;

  __device__ float at(int64_t row, int64_t col) const {
    if (scaling == TE_FL_SCALING_MXFP8) {
      const auto* codes = reinterpret_cast<const uint8_t*>(scale_inv);
      const uint8_t code = columnwise ? codes[row / kMxfp8Block * mxfp8_column_pitch(cols) + col]
                                      : codes[row * mxfp8_row_pitch(cols) + col / kMxfp8Block];
      return data.at(row * cols + col) * numeric::e8m0_to_float(code);
    }
    const int64_t i = transposed ? col : row, j = transposed ? row : col;
    const int64_t lines = transposed ? cols : rows, length = transposed ? rows : cols;
    const float value = data.at(i * length + j);
    switch (scaling) {
      case TE_FL_SCALING_NONE:
        return value;
      case TE_FL_SCALING_TENSOR:
        return value * *scale_inv;
      case TE_FL_SCALING_BLOCK_1X128:
        return value * scale_inv[j / 128 * ((lines + 3) / 4 * 4) + i];
      default:
        return value * scale_inv[i / 128 * (((length + 127) / 128 + 3) / 4 * 4) + j / 128];
    }
  }
};

// Selects row-wise or column-wise data: that whose blocks run along K if the tensor has it, else
// the other. `along`: K is the contiguous dimension of `t`.
inline Values make_values(const te_fl_tensor& t, bool along) {
  Values v;
  const backend::Matrix m = backend::as_matrix(t);
  v.data = Source(t);
  v.scaling = backend::scaling(t);
  v.rows = m.rows;
  v.cols = m.cols;
  if (v.scaling == TE_FL_SCALING_NONE) return v;
  const te_fl_quant& quant = *t.quant;
  v.columnwise = along ? v.data.data == nullptr : quant.columnwise_data != nullptr;
  v.transposed = v.columnwise && v.scaling != TE_FL_SCALING_MXFP8;
  if (v.columnwise) v.data.data = quant.columnwise_data;
  const void* scale = v.columnwise ? quant.columnwise_scale_inv : quant.scale_inv;
  if (scale == nullptr && v.scaling == TE_FL_SCALING_TENSOR) scale = quant.scale_inv;
  v.scale_inv = static_cast<const float*>(scale);
  return v;
}

static __global__ void widen_kernel(Values in, float* out) {
  const int64_t n = in.rows * in.cols, step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n; i += step) {
    out[i] = in.at(i / in.cols, i % in.cols);
  }
}

inline void convert(cudaStream_t stream, const Problem& p, const Operand& o, void* out,
                    int64_t lines, int64_t padded_lines) {
  if (padded_lines == 0 || p.padded_k == 0) return;
  if (p.convert == Convert::kWiden) {
    const Values values = make_values(*o.tensor, o.along);
    widen_kernel<<<blocks_for(values.rows * values.cols), kThreads, 0, stream>>>(
        values, static_cast<float*>(out));
    return check_launch("widen_kernel");
  }
  pad_kernel<<<blocks_for(padded_lines * p.padded_k), kThreads, 0, stream>>>(
      static_cast<const uint8_t*>(o.codes), lines, p.k, static_cast<uint8_t*>(out), padded_lines,
      p.padded_k);
  check_launch("pad_kernel");
}

}  // namespace te_fl::cuda
