// Column sums of an unquantised 16-bit matrix, at memory bandwidth.
#pragma once

#include "te_fl/backend.hpp"
#include "te_fl/dtype.hpp"

namespace te_fl::cuda {

// True if fast_column_sums() accepts the matrix, which must be contiguous: F16 or BF16, 16-byte
// aligned, and a number of columns that is a multiple of 8.
inline bool has_fast_column_sums(const te_fl_tensor& t) noexcept {
  const int dtype = dtype_index(t.dl.dtype);
  const int64_t cols = backend::as_matrix(t).cols;
  return t.quant == nullptr && (dtype == TE_FL_F16 || dtype == TE_FL_BF16) && cols % 8 == 0 &&
         cols > 0 && reinterpret_cast<uintptr_t>(backend::data<const void>(t)) % 16 == 0;
}
// Computes out[cols] = the column sums, plus out's previous values if `accumulate`. Sums in the
// same order as column_sums() (store.cuh) and needs the same scratch `partials`.
void fast_column_sums(const te_fl_context& ctx, const te_fl_tensor& t, float* partials,
                      const te_fl_tensor& out, bool accumulate);

}  // namespace te_fl::cuda
