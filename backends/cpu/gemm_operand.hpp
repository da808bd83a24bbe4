// Converts operands of a matrix product to FP32 or BF16, which the GEMM library multiplies.
#pragma once

#include <cstdint>

#include "tensor_view.hpp"

namespace te_fl::cpu {

// The row-wise or column-wise data of an operand that the GEMM reads: a contiguous [rows, cols]
// matrix.
struct StoredMatrix {
  const char* data;
  const float* scales;  // block scaling: scale_inv of this data; else NULL
  int dtype;
  uint32_t scaling;
  int64_t rows, cols;
  bool transposed;  // must be transposed to become op(X)
  float factor;     // multiplies the values: the per-tensor scale_inv, or 1

  int64_t size() const { return rows * cols; }
  bool is_block() const { return scales != nullptr; }
};

// Returns why an operand is not supported; nullptr if it is. Reads metadata only.
const char* refuse_operand(const te_fl_tensor& t) noexcept;

// Chooses between row-wise and column-wise data. With block scaling, prefers the data whose blocks
// run along K. `rowwise_contracts`: K is the last dimension of the row-wise data. Throws
// INVALID_ARGUMENT if data or scales are missing.
StoredMatrix stored_matrix(const te_fl_tensor& t, bool trans, bool rowwise_contracts);

// True if the values, without `factor`, are exact in BF16: BF16 itself, per-tensor FP8, and
// block-scaled FP8 whose scales are powers of two.
bool is_exact_in_bf16(const StoredMatrix& m);

// Both functions convert all values, without multiplying by `factor`, to contiguous memory of
// m.size() elements.
void convert_to_f32(const StoredMatrix& m, float* out);
void convert_to_bf16(const StoredMatrix& m, uint16_t* out);  // requires is_exact_in_bf16()

}  // namespace te_fl::cpu
