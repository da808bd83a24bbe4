#pragma once

#include "te_fl/export.hpp"
#include "te_fl/tensor.hpp"

namespace te_fl {

// Data and scales of an existing quantised tensor. Each tensor is compact, and all are on one
// device. An undefined Tensor is absent.
struct QuantizedParts {
  // Row-wise data, in the shape of the tensor: 8-bit floats; kNVFP4: 4-bit floats. Undefined,
  // except with kTensor, if the tensor has only column-wise data, of which it is then a matrix.
  Tensor codes;
  Tensor columns;  // column-wise data: [K, M] if the row-wise data is [M, K]; kMXFP8: [M, K]
  // shapes as for Tensor::scale_inv(); kTensor has only scale_inv
  Tensor scale_inv, columnwise_scale_inv;
  Tensor amax;  // F32 [1], only for kTensor and kNVFP4
  // F32 [1], only for kNVFP4: the amax of the column-wise data; undefined: `amax` is
  Tensor columnwise_amax;
};

// Makes a quantised tensor of these parts. It shares their memory and keeps their owners alive.
// INVALID_ARGUMENT names the part that does not fit.
TE_FL_API Result<Tensor> wrap_quantized(Scaling scaling, const QuantizedParts& parts);

}  // namespace te_fl
