// Sums of the columns of a plain 16-bit matrix, at a copy's speed.
#pragma once

#include "te_fl/backend.hpp"
#include "te_fl/dtype.hpp"

namespace te_fl::cuda {

// True if the matrix can be read 16 bytes at a time: F16 or BF16, aligned, whole pieces in a row.
// Matrices are compact.
inline bool has_fast_column_sums(const te_fl_tensor& t) noexcept {
  const int dtype = dtype_index(t.dl.dtype);
  const int64_t cols = backend::as_matrix(t).cols;
  return t.quant == nullptr && (dtype == TE_FL_F16 || dtype == TE_FL_BF16) && cols % 8 == 0 &&
         cols > 0 && reinterpret_cast<uintptr_t>(backend::data<const void>(t)) % 16 == 0;
}
// out[cols] = sums (+ what it holds), added up in the order of column_sums() (store.cuh), whose
// scratch `partials` is.
void fast_column_sums(const te_fl_context& ctx, const te_fl_tensor& t, float* partials,
                      const te_fl_tensor& out, bool accumulate);

}  // namespace te_fl::cuda
