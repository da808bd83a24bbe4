// Converts operands of a matrix product to FP32 or BF16, which the GEMM library multiplies.
#pragma once

#include <cstdint>

#include "tensor_view.hpp"

namespace te_fl::cpu {

// The copy of an operand that is read; [rows, cols], compact.
struct StoredMatrix {
  const char* data;
  const float* scales;  // block scaling: the copy's scale_inv; else NULL
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

// Chooses the copy that is read. With block scaling, it is the one whose blocks run along the
// contraction if it exists. `rowwise_contracts`: the contraction is the last dimension of the
// row-wise copy. Throws invalid() if parts are missing.
StoredMatrix stored_matrix(const te_fl_tensor& t, bool trans, bool rowwise_contracts);

// True if the values, without `factor`, are exact in BF16: BF16 itself, per-tensor FP8, and
// block-scaled FP8 whose scales are powers of two.
bool is_exact_in_bf16(const StoredMatrix& m);

// Convert all values, without `factor`, to compact memory of m.size() elements.
void convert_to_f32(const StoredMatrix& m, float* out);
void convert_to_bf16(const StoredMatrix& m, uint16_t* out);  // requires is_exact_in_bf16()

}  // namespace te_fl::cpu
