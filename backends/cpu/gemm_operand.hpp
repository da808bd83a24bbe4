// Operands of a matrix product, brought into what the GEMM library multiplies: FP32 or BF16.
#pragma once

#include <cstdint>

#include "tensor_view.hpp"

namespace te_fl::cpu {

// A stored matrix: the copy of an operand that is read, [rows, cols] compact.
struct StoredMatrix {
  const char* data;
  const float* scales;  // block scaling: the copy's scale_inv; else null
  int dtype;
  uint32_t scaling;
  int64_t rows, cols;
  bool transposed;  // must be transposed to become op(X)
  float factor;     // the factor of the values: the per-tensor scale_inv, or 1

  int64_t size() const { return rows * cols; }
  bool is_block() const { return scales != nullptr; }
};

// Says why an operand is not served; nullptr if it is. Reads metadata only.
const char* refuse_operand(const te_fl_tensor& t) noexcept;

// Chooses the copy. In block scaling it is the one whose blocks run along the contraction, which
// is the last extent of the row-wise copy if rowwise_contracts, provided that it exists. Throws
// invalid() if parts are missing.
StoredMatrix stored_matrix(const te_fl_tensor& t, bool trans, bool rowwise_contracts);

// True if the values, without the factor, are BF16 numbers: BF16 itself, per-tensor FP8, and block
// scaled FP8 whose scales are powers of two.
bool is_exact_in_bf16(const StoredMatrix& m);

// All values without the factor, compact, into memory for m.size() elements.
void convert_to_f32(const StoredMatrix& m, float* out);
void convert_to_bf16(const StoredMatrix& m, uint16_t* out);  // only if exact

}  // namespace te_fl::cpu
