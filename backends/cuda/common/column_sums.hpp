// Sums of the columns of a plain 16-bit matrix, at a copy's speed.
#pragma once

#include "te_fl/backend.hpp"

namespace te_fl::cuda {

// Whether it can be read 16 bytes at a time: F16 or BF16, aligned, whole pieces in a row. Matrices
// are compact.
bool has_fast_column_sums(const te_fl_tensor& t);
// out[cols] = sums (+ what it holds), added up in the order of column_sums() (store.cuh), whose
// scratch `partials` is.
void fast_column_sums(const te_fl_context& ctx, const te_fl_tensor& t, float* partials,
                      const te_fl_tensor& out, bool accumulate);

}  // namespace te_fl::cuda
