// The part of GemmUnit for operands whose rows ranks have parts of.
#include "nn/base/tensor_ops.hpp"
#include "nn/modules/gathered_rows.hpp"
#include "nn/modules/gemm_unit.hpp"

namespace te_fl::nn::detail {
namespace {

Status check_values(const Tensor& x) {
  if (!x.quantized()) return {};
  return invalid_argument(
      x.describe() +
      " is quantised, and where ranks have parts of the rows a linear map takes "
      "values, which it quantises with the ranks' scale; dequantize it first");
}

}  // namespace

Result<Tensor> GemmUnit::part_of_input(const Use& use, const Tensor& x) {
  if (const auto* current = std::get_if<Float8CurrentScaling>(use.mode.recipe.get())) {
    return quantised_part(*spec_.input_rows, *current, Role::kInput, x);
  }
  // With blocks the column-wise copy is made of the values; else a backward makes it of the codes.
  const bool columns = use.wgrad && use.mode.delayed() == nullptr;
  TE_FL_ASSIGN_OR_RETURN(Tensor part, empty_quantized(*use.mode.recipe, Role::kInput, x.shape(),
                                                      {.rowwise = true, .columnwise = columns},
                                                      spec_.device, *forward_, kInputSlot));
  TE_FL_RETURN_IF_ERROR(quantize(x, part));
  return part;
}

Result<Tensor> GemmUnit::gathered_input(Use& use, const Tensor& x) {
  TE_FL_RETURN_IF_ERROR(check_values(x));
  SequenceRanks& ranks = *spec_.input_rows;
  if (use.mode.fp8 && !gathers_codes(ranks, use.mode, Role::kInput, x.size(0))) {
    TE_FL_ASSIGN_OR_RETURN(const Tensor whole, gather_rows_now(ranks, x));
    return whole_input(use, whole);
  }
  use.dx_dtype = x.dtype();
  TE_FL_ASSIGN_OR_RETURN(const Tensor part,
                         use.mode.fp8 ? part_of_input(use, x) : cast(x, spec_.activation_dtype));
  if (use.wgrad) {
    const bool blocks = part.quantized() && part.scaling() != Scaling::kTensor;
    use.part = blocks ? part.columnwise_only() : part;
  }
  return gather_rows_now(ranks, part);
}

Result<GemmUnit::Gradient> GemmUnit::gathered_grad(const Use& use, const Tensor& dy) {
  TE_FL_RETURN_IF_ERROR(check_values(dy));
  SequenceRanks& ranks = *spec_.gradient_rows;
  const bool values = !gathers_codes(ranks, use.mode, Role::kGradient, dy.size(0));
  // The bias's gradient, of this rank's rows, comes with delayed scaling's codes, else before.
  const bool with_bias = wants_bias_grad() && !values && use.mode.delayed() != nullptr;
  if (wants_bias_grad() && !with_bias) {
    TE_FL_ASSIGN_OR_RETURN(const Tensor own, cast(dy, spec_.activation_dtype));
    TE_FL_RETURN_IF_ERROR(sum_bias_grad(own));
  }
  if (values) {
    TE_FL_ASSIGN_OR_RETURN(const Tensor whole, gather_rows_now(ranks, dy));
    return whole_grad(use, whole, false);
  }
  Tensor part;
  if (const auto* current = std::get_if<Float8CurrentScaling>(use.mode.recipe.get())) {
    TE_FL_ASSIGN_OR_RETURN(part, quantised_part(ranks, *current, Role::kGradient, dy));
  } else {
    TE_FL_ASSIGN_OR_RETURN(part, grad_buffer(use, dy.size(0), false));
    TE_FL_RETURN_IF_ERROR(with_bias ? quantise_with_bias(dy, part) : quantize(dy, part));
  }
  Gradient grad;
  grad.bias_done = true;
  TE_FL_ASSIGN_OR_RETURN(
      grad.tensor, gather_rows_now(ranks, part, {.rowwise = true, .columnwise = wants_wgrad(use)}));
  return grad;
}

Status GemmUnit::wgrad_of(const Use& use, const Gradient& grad, RowGather& input) {
  TE_FL_ASSIGN_OR_RETURN(const Tensor whole, input.take_whole());
  return wgrad(use, grad, whole);
}

Result<Tensor> GemmUnit::products(const Use& use, const Gradient& grad, const Tensor* into) {
  if (spec_.input_rows == nullptr) {
    Tensor dx;
    if (use.dgrad) {
      TE_FL_ASSIGN_OR_RETURN(dx, dgrad(use, grad.tensor, into));
    }
    TE_FL_RETURN_IF_ERROR(wgrad(use, grad));
    return dx;
  }
  SequenceRanks& ranks = *spec_.input_rows;
  std::optional<RowGather> input;
  if (use.part.defined() && wants_wgrad(use)) {
    TE_FL_ASSIGN_OR_RETURN(
        input, RowGather::begin(ranks, use.part, {.rowwise = false, .columnwise = true}));
  }
  RowScatter scatter;
  if (use.dgrad) {
    TE_FL_ASSIGN_OR_RETURN(Tensor dx, dgrad(use, grad.tensor));
    TE_FL_ASSIGN_OR_RETURN(scatter, RowScatter::begin(ranks, std::move(dx)));
  }
  TE_FL_RETURN_IF_ERROR(input.has_value() ? wgrad_of(use, grad, *input) : wgrad(use, grad));
  return scatter.take_part();
}

Result<Tensor> GemmUnit::backward(const Use& use, const Tensor& dy, const Tensor* into) {
  TE_FL_RETURN_IF_ERROR(check_unchanged(use));
  TE_FL_ASSIGN_OR_RETURN(const Gradient grad, prepare_grad(use, dy));
  return products(use, grad, into);
}

}  // namespace te_fl::nn::detail
