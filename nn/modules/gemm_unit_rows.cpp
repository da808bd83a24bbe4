// The functions of GemmUnit for operands whose rows are sharded over ranks.
#include <vector>

#include "core/tensor/tensor_access.hpp"
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

// True if the GEMM of `input` and its reduce-scatter are split into ranges of rows that overlap.
bool sums_in_pieces(const SequenceRanks& ranks, const Tensor& input, int64_t out, DType dtype) {
  if (input.quantized() && input.scaling() != Scaling::kTensor) return false;
  const int64_t from = ranks.chunked_from();
  return from != 0 && bytes_for(dtype, input.size(0) / ranks.size() * out) >= from;
}

}  // namespace

Result<Tensor> GemmUnit::forward_scattered(Use& use, const Tensor& input,
                                           const ForwardOptions& options) {
  SequenceRanks& ranks = *spec_.gradient_rows;
  if (sums_in_pieces(ranks, input, spec_.out, spec_.activation_dtype)) {
    return forward_in_pieces(use, input, options);
  }
  TE_FL_ASSIGN_OR_RETURN(const Tensor y, forward(use, input, options));
  return scatter_rows_now(ranks, y);
}

Status GemmUnit::product_in_chunks(const te_fl_generic_gemm_args& args, RowGather& rows,
                                   const Tensor& d, const Tensor* residual) const {
  const int64_t own = rows.part().size(0), begin = rows.rank() * own;
  const auto product = [&](const Tensor& a, int64_t from, int64_t count) -> Status {
    if (count == 0) return {};
    te_fl_generic_gemm_args chunk = args;
    TE_FL_ASSIGN_OR_RETURN(const Tensor to, d.slice(0, from, from + count));
    Tensor added;
    if (residual != nullptr) {
      TE_FL_ASSIGN_OR_RETURN(added, residual->slice(0, from, from + count));
      chunk.residual = added;
    }
    chunk.a = a;
    chunk.d = to;
    return ops::generic_gemm(chunk, call_options(spec_.device));
  };
  TE_FL_ASSIGN_OR_RETURN(const Tensor mine, take_rows(rows.part(), 0, own));
  TE_FL_RETURN_IF_ERROR(product(mine, begin, own));
  TE_FL_RETURN_IF_ERROR(rows.arrive());
  const int64_t end = begin + own, all = d.size(0);
  TE_FL_ASSIGN_OR_RETURN(const Tensor before, take_rows(rows.whole(), 0, begin));
  TE_FL_RETURN_IF_ERROR(product(before, 0, begin));
  TE_FL_ASSIGN_OR_RETURN(const Tensor behind, take_rows(rows.whole(), end, all - end));
  return product(behind, end, all - end);
}

Result<Tensor> GemmUnit::forward_in_pieces(Use& use, const Tensor& input,
                                           const ForwardOptions& options) {
  Weight weight;
  TE_FL_ASSIGN_OR_RETURN(te_fl_generic_gemm_args args, product(use, input, options, weight));
  TE_FL_ASSIGN_OR_RETURN(const Tensor y, Tensor::empty({input.size(0), spec_.out},
                                                       spec_.activation_dtype, spec_.device));
  const auto chunk = [&](int64_t begin, int64_t count) -> Status {
    TE_FL_ASSIGN_OR_RETURN(const Tensor a, take_rows(input, begin, count));
    TE_FL_ASSIGN_OR_RETURN(const Tensor d, y.slice(0, begin, begin + count));
    args.a = a;
    args.d = d;
    return ops::generic_gemm(args, call_options(spec_.device));
  };
  TE_FL_ASSIGN_OR_RETURN(RowScatter scatter, RowScatter::in_chunks(*spec_.gradient_rows, y, chunk));
  keep(use, input, weight);
  return scatter.take_part();
}

Result<Tensor> GemmUnit::part_of_input(const Use& use, const Tensor& x) {
  if (const auto* current = std::get_if<Float8CurrentScaling>(use.mode.recipe.get())) {
    return quantised_part(*spec_.input_rows, *current, Role::kInput, x);
  }
  // With block scaling the column-wise data are quantised here from the unquantised input;
  // otherwise the backward computes them from the row-wise data.
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
  // Gathers all rows first if amaxes are collected or saturation is checked, since both read the
  // complete input before the GEMM.
  if (!in_chunks(ranks, part) || use.mode.calibrating || use.unscaled) {
    return gather_rows_now(ranks, part);
  }
  TE_FL_ASSIGN_OR_RETURN(RowGather begun, RowGather::begin(ranks, part, {}));
  use.arriving = std::make_shared<RowGather>(std::move(begun));
  return use.arriving->whole();
}

Result<GemmUnit::Gradient> GemmUnit::gathered_grad(const Use& use, const Tensor& dy,
                                                   bool may_arrive) {
  TE_FL_RETURN_IF_ERROR(check_values(dy));
  SequenceRanks& ranks = *spec_.gradient_rows;
  const bool values = !gathers_codes(ranks, use.mode, Role::kGradient, dy.size(0));
  // Computes the bias gradient of this rank's rows: with delayed scaling together with the
  // quantisation below, otherwise in the next statement.
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
  const Copies copies{.rowwise = true, .columnwise = wants_wgrad(use)};
  if (!may_arrive || !in_chunks(ranks, part)) {
    TE_FL_ASSIGN_OR_RETURN(grad.tensor, gather_rows_now(ranks, part, copies));
    return grad;
  }
  TE_FL_ASSIGN_OR_RETURN(RowGather begun, RowGather::begin(ranks, part, copies));
  grad.arriving = std::make_shared<RowGather>(std::move(begun));
  grad.tensor = grad.arriving->whole();
  return grad;
}

Status GemmUnit::arrived(Gradient& grad) {
  if (grad.arriving == nullptr) return {};
  TE_FL_ASSIGN_OR_RETURN(grad.tensor, grad.arriving->take_whole());
  grad.arriving = nullptr;
  return {};
}

Status GemmUnit::gathered_wgrad(const Use& use, const Gradient& grad, RowGather& input) {
  TE_FL_ASSIGN_OR_RETURN(const Tensor whole, input.take_whole());
  return wgrad(use, grad, whole);
}

Result<Tensor> GemmUnit::products(const Use& use, Gradient& grad, const Tensor* into) {
  if (spec_.input_rows == nullptr) {
    Tensor dx;
    if (use.dgrad) {
      TE_FL_ASSIGN_OR_RETURN(dx, dgrad(use, grad, into));
    }
    TE_FL_RETURN_IF_ERROR(arrived(grad));
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
    TE_FL_ASSIGN_OR_RETURN(Tensor dx, dgrad(use, grad));
    TE_FL_ASSIGN_OR_RETURN(scatter, RowScatter::begin(ranks, std::move(dx)));
  }
  TE_FL_RETURN_IF_ERROR(input.has_value() ? gathered_wgrad(use, grad, *input) : wgrad(use, grad));
  return scatter.take_part();
}

Result<Tensor> GemmUnit::backward(Use& use, const Tensor& dy, const Tensor* into) {
  TE_FL_RETURN_IF_ERROR(check_unchanged(use));
  TE_FL_RETURN_IF_ERROR(read_kept(use));
  TE_FL_ASSIGN_OR_RETURN(Gradient grad, prepare_grad(use, dy, true));
  return products(use, grad, into);
}

}  // namespace te_fl::nn::detail
