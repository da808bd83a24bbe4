#include "te_fl/wrap_quantized.hpp"

#include <algorithm>
#include <memory>
#include <string>

#include "core/tensor/tensor_access.hpp"
#include "te_fl/plugin.h"

namespace te_fl {
namespace {

std::string shape_text(std::span<const int64_t> shape) {
  std::string text = "[";
  for (const int64_t extent : shape) {
    text += (text.size() == 1 ? "" : ",") + std::to_string(extent);
  }
  return text + "]";
}

Status check_part(const char* name, const Tensor& part, DType dtype, std::span<const int64_t> shape,
                  const Device& device) {
  if (part.defined() && !part.quantized() && part.dtype() == dtype && part.contiguous() &&
      part.device() == device && std::ranges::equal(part.shape(), shape)) {
    return {};
  }
  return invalid_argument("wrap_quantized: " + std::string(name) + " is " +
                          (part.defined() ? part.describe() : "undefined") + "; it must be " +
                          std::string(te_fl::name(dtype)) + " " + shape_text(shape) +
                          ", compact, on " + to_string(device));
}

Status check_codes(Scaling scaling, const Tensor& codes) {
  if (scaling != Scaling::kTensor && scaling != Scaling::kBlock128x128) {
    return invalid_argument("wrap_quantized: the scaling is " + std::string(name(scaling)) +
                            "; it must be tensor or block_128x128");
  }
  const bool eight_bits = codes.dtype() == DType::kF8E4M3 || codes.dtype() == DType::kF8E5M2;
  if (codes.defined() && eight_bits && !codes.quantized() && codes.contiguous()) return {};
  return invalid_argument("wrap_quantized: codes is " +
                          (codes.defined() ? codes.describe() : std::string("undefined")) +
                          "; it must be f8e4m3 or f8e5m2, compact");
}

}  // namespace

Result<Tensor> wrap_quantized(Scaling scaling, const QuantizedParts& parts) {
  TE_FL_RETURN_IF_ERROR(check_codes(scaling, parts.codes));
  const Tensor& codes = parts.codes;
  const Device device = codes.device();
  const auto [m, k] = core::logical_matrix(codes.shape());
  const bool blocks = scaling == Scaling::kBlock128x128;
  const auto factors = [&, m = m, k = k](bool columnwise) {
    const auto extents = scale_inv_shape(scaling, columnwise, m, k);
    return blocks ? Shape{extents[0], extents[1]} : Shape{1};
  };
  TE_FL_RETURN_IF_ERROR(
      check_part("scale_inv", parts.scale_inv, DType::kF32, factors(false), device));
  te_fl_quant quant{};
  quant.scaling = static_cast<uint32_t>(scaling);
  quant.scale_inv = parts.scale_inv.raw_data();
  if (parts.columns.defined()) {
    TE_FL_RETURN_IF_ERROR(check_part("columns", parts.columns, codes.dtype(), Shape{k, m}, device));
    quant.columnwise_data = parts.columns.raw_data();
    if (blocks) {
      TE_FL_RETURN_IF_ERROR(check_part("columnwise_scale_inv", parts.columnwise_scale_inv,
                                       DType::kF32, factors(true), device));
      quant.columnwise_scale_inv = parts.columnwise_scale_inv.raw_data();
    }
  }
  if (!blocks) {
    TE_FL_RETURN_IF_ERROR(check_part("amax", parts.amax, DType::kF32, Shape{1}, device));
    quant.amax = parts.amax.data<float>();
  }
  auto owner = std::make_shared<QuantizedParts>(parts);
  Tensor tensor =
      Tensor::Access::make({codes.raw_data(), codes.shape(), {}, codes.dtype(), device, owner});
  Tensor::Access::set_quant(tensor, quant, std::move(owner));
  return tensor;
}

}  // namespace te_fl
