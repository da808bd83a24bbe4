#pragma once

#include "te_fl/export.hpp"
#include "te_fl/tensor.hpp"

namespace te_fl {

// The parts of a quantised tensor that someone else holds. Each is compact and on one device;
// undefined ones are absent.
struct QuantizedParts {
  Tensor codes;                            // the row-wise copy: 8-bit floats of the tensor's shape
  Tensor columns;                          // the column-wise copy: [K, M] for codes of [M, K]
  Tensor scale_inv, columnwise_scale_inv;  // of Tensor::scale_inv()'s shapes; kTensor has one
  Tensor amax;                             // F32 [1], kTensor
};

// The quantised tensor that these parts make; it shares their memory and keeps alive what they
// keep. kTensor and kBlock128x128 are served. INVALID_ARGUMENT names the part that does not fit.
TE_FL_API Result<Tensor> wrap_quantized(Scaling scaling, const QuantizedParts& parts);

}  // namespace te_fl
