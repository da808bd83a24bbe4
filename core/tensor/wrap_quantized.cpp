#include "te_fl/wrap_quantized.hpp"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

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

Status check_codes(Scaling scaling, const char* name, const Tensor& codes) {
  if (scaling == Scaling::kNone) {
    return invalid_argument(
        "wrap_quantized: the scaling is none; it must be one of a quantised tensor");
  }
  const bool four = scaling == Scaling::kNVFP4;
  const bool fits = four ? codes.dtype() == DType::kF4E2M1
                         : codes.dtype() == DType::kF8E4M3 || codes.dtype() == DType::kF8E5M2;
  if (codes.defined() && fits && !codes.quantized() && codes.contiguous()) return {};
  return invalid_argument("wrap_quantized: " + std::string(name) + " is " +
                          (codes.defined() ? codes.describe() : std::string("undefined")) +
                          "; it must be " + (four ? "f4e2m1" : "f8e4m3 or f8e5m2") + ", compact");
}

}  // namespace

Result<Tensor> wrap_quantized(Scaling scaling, const QuantizedParts& parts) {
  const bool by_tensor = scaling == Scaling::kTensor, two_levels = scaling == Scaling::kNVFP4;
  const bool rowwise = parts.codes.defined() || by_tensor;
  const Tensor& codes = rowwise ? parts.codes : parts.columns;
  TE_FL_RETURN_IF_ERROR(check_codes(scaling, rowwise ? "codes" : "columns", codes));
  const Device device = codes.device();
  const bool transposed = scaling != Scaling::kMXFP8;
  auto [m, k] = core::logical_matrix(codes.shape());
  if (!rowwise && transposed) std::swap(m, k);
  const DType factor = static_cast<DType>(describe(scaling).scale_dtype);
  const auto factors = [&, m = m, k = k](bool columnwise) {
    const auto extents = scale_inv_shape(scaling, columnwise, m, k);
    return by_tensor ? Shape{1} : Shape{extents[0], extents[1]};
  };
  te_fl_quant quant{};
  quant.scaling = static_cast<uint32_t>(scaling);
  if (rowwise) {
    TE_FL_RETURN_IF_ERROR(check_part("scale_inv", parts.scale_inv, factor, factors(false), device));
    quant.scale_inv = parts.scale_inv.raw_data();
  }
  if (parts.columns.defined()) {
    TE_FL_RETURN_IF_ERROR(check_part("columns", parts.columns, codes.dtype(),
                                     transposed ? Shape{k, m} : Shape{m, k}, device));
    quant.columnwise_data = parts.columns.raw_data();
    if (!by_tensor) {
      TE_FL_RETURN_IF_ERROR(check_part("columnwise_scale_inv", parts.columnwise_scale_inv, factor,
                                       factors(true), device));
      quant.columnwise_scale_inv = parts.columnwise_scale_inv.raw_data();
    }
  }
  if (by_tensor || two_levels) {
    TE_FL_RETURN_IF_ERROR(check_part("amax", parts.amax, DType::kF32, Shape{1}, device));
    quant.amax = parts.amax.data<float>();
  }
  if (two_levels && parts.columnwise_amax.defined()) {
    TE_FL_RETURN_IF_ERROR(
        check_part("columnwise_amax", parts.columnwise_amax, DType::kF32, Shape{1}, device));
    quant.columnwise_amax = parts.columnwise_amax.data<float>();
  }
  auto owner = std::make_shared<QuantizedParts>(parts);
  const Shape shape = rowwise ? Shape(codes.shape().begin(), codes.shape().end()) : Shape{m, k};
  Tensor tensor = Tensor::Access::make(
      {rowwise ? codes.raw_data() : nullptr, shape, {}, codes.dtype(), device, owner});
  Tensor::Access::set_quant(tensor, quant, std::move(owner));
  return tensor;
}

}  // namespace te_fl
