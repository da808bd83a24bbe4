#pragma once

#include "te_fl/export.hpp"
#include "te_fl/status.hpp"
#include "te_fl/tensor.hpp"

namespace te_fl::nn {

// Copies one F32 value to the host and returns it. Waits for the stream, so it is a synchronisation
// point.
TE_FL_API Result<float> item(const Tensor& scalar);

}  // namespace te_fl::nn
