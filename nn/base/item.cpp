#include "te_fl/nn/base/item.hpp"

#include "te_fl/device.hpp"

namespace te_fl::nn {

Result<float> item(const Tensor& scalar) {
  if (!scalar.defined() || scalar.dtype() != DType::kF32 || scalar.numel() != 1) {
    return invalid_argument("item: the tensor is " + scalar.describe() +
                            "; it must be F32 with one element");
  }
  float value = 0;
  void* const stream = devices::current_stream(scalar.device());
  TE_FL_RETURN_IF_ERROR(
      devices::copy(Device(), &value, scalar.device(), scalar.raw_data(), sizeof value, stream));
  TE_FL_RETURN_IF_ERROR(devices::synchronize(scalar.device(), stream));
  return value;
}

}  // namespace te_fl::nn
