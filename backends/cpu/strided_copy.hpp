// Copies between tensors with any strides.
#pragma once

#include "tensor_view.hpp"

namespace te_fl::cpu {

// Returns why a copy is not supported; nullptr if it is. Reads metadata only.
const char* refuse_copy(const te_fl_tensor& input, const te_fl_tensor& output) noexcept;

// output = convert(input). refuse_copy() must accept both tensors, which must have the same shape.
void copy_tensor(const te_fl_tensor& input, const te_fl_tensor& output);

}  // namespace te_fl::cpu
