#pragma once

#include <cstdint>

#include "te_fl/tensor.hpp"

// One factor for each row of a matrix.
namespace te_fl::nn::detail {

// The row_id_map I32 [1, n] that maps each token to the row of its number.
Result<Tensor> identity_rows(int64_t n, const Device& device);
// out[t] = factors[t] rows[t], factors F32 [n, 1]. `identity` must be identity_rows(n).
Status scale_rows(const Tensor& rows, const Tensor& identity, const Tensor& factors,
                  const Tensor& out);
// The gradients of scale_rows().
Status scale_rows_backward(const Tensor& grad, const Tensor& rows, const Tensor& identity,
                           const Tensor& factors, const Tensor& d_rows, const Tensor& d_factors);

}  // namespace te_fl::nn::detail
