#include "nn/fp8/custom_operands.hpp"

#include <string>

#include "nn/base/tensor_ops.hpp"
#include "nn/fp8/fp8_values.hpp"

namespace te_fl::nn::detail {
namespace {

Status check_operand(const Tensor& operand, const TensorQuantiser& quantiser, const Tensor& from,
                     bool columnwise) {
  const char* which = columnwise ? "column-wise" : "row-wise";
  const auto refuse = [&](const std::string& why) {
    return invalid_argument("the quantiser \"" + quantiser.name + "\" returned " + why +
                            " as the " + which + " operand of " + from.describe());
  };
  if (!operand.defined()) return refuse("nothing");
  const std::string found = operand.describe();
  if (operand.device() != from.device()) return refuse(found + ", which is on another device,");
  const bool fits =
      operand.shape().size() == 2 && operand.size(1) == from.size(1) &&
      (columnwise ? operand.size(0) >= from.size(0) : operand.size(0) == from.size(0));
  if (!fits) return refuse(found + ", which has another shape,");
  if (!operand.quantized() && !is_high(operand.dtype()))
    return refuse(found + ", which has no scale,");
  return {};
}

}  // namespace

Result<Tensor> dequantised(const Tensor& codes, DType dtype) {
  const Tensor read = codes.has_rowwise() ? codes.rowwise_only() : codes;
  TE_FL_ASSIGN_OR_RETURN(Tensor values, Tensor::empty(codes.shape(), dtype, codes.device()));
  if (codes.numel() > 0) TE_FL_RETURN_IF_ERROR(copy_values(read, values));
  return values;
}

Status read_nvfp4(Tensor& operand) {
  if (!operand.defined() || operand.scaling() != Scaling::kNVFP4) return {};
  TE_FL_ASSIGN_OR_RETURN(operand, dequantised(operand, DType::kF32));
  return {};
}

Result<QuantisedOperand> quantise_custom(const std::shared_ptr<const TensorQuantiser>& quantiser,
                                         const Tensor& values, Copies copies) {
  if (quantiser == nullptr || values.numel() == 0) return QuantisedOperand{values, values};
  TE_FL_ASSIGN_OR_RETURN(QuantisedOperand made,
                         quantiser->quantise(values, copies.rowwise, copies.columnwise));
  if (copies.rowwise) TE_FL_RETURN_IF_ERROR(check_operand(made.rowwise, *quantiser, values, false));
  if (copies.columnwise) {
    TE_FL_RETURN_IF_ERROR(check_operand(made.columnwise, *quantiser, values, true));
  }
  TE_FL_RETURN_IF_ERROR(read_nvfp4(made.rowwise));
  return made;
}

}  // namespace te_fl::nn::detail
