// Copies between tensors of any strides.
#pragma once

#include "tensor_view.hpp"

namespace te_fl::cpu {

// Says why a copy is not served; nullptr if it is. Reads metadata only.
const char* refuse_copy(const te_fl_tensor& input, const te_fl_tensor& output) noexcept;

// output = convert(input); both pass refuse_copy and have one shape.
void copy_tensor(const te_fl_tensor& input, const te_fl_tensor& output);

}  // namespace te_fl::cpu
