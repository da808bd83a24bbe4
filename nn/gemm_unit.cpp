#include "nn/gemm_unit.hpp"

#include <array>
#include <mutex>

#include "nn/tensor_ops.hpp"

namespace te_fl::nn::detail {
namespace {

constexpr int64_t kInputSlot = 0;
constexpr int64_t kWeightSlot = 1;
constexpr int64_t kGradSlot = 0;

// Partial sums stay in full precision where it matters: always in gradients and with block scaling.
bool split_accumulator(const Fp8Mode& mode, bool gradient) {
  return gradient || (mode.fp8 && std::holds_alternative<Float8BlockScaling>(*mode.recipe));
}

}  // namespace

GemmUnit::GemmUnit(const Spec& spec, std::shared_ptr<Parameter> weight,
                   std::shared_ptr<Parameter> bias)
    : spec_(spec), weight_(std::move(weight)), bias_(std::move(bias)) {}

Result<GemmUnit::Use> GemmUnit::begin(bool training) {
  Use use;
  use.training = training;
  if (spec_.high_precision) return use;
  TE_FL_ASSIGN_OR_RETURN(use.mode, current_mode());
  const DelayedScaling* delayed = use.mode.delayed();
  if (delayed == nullptr || !(use.mode.fp8 || use.mode.calibrating)) return use;
  TE_FL_RETURN_IF_ERROR(forward_->ensure(delayed->amax_history_len, spec_.device));
  if (training || use.mode.calibrating) {
    TE_FL_RETURN_IF_ERROR(backward_->ensure(delayed->amax_history_len, spec_.device));
    std::lock_guard lock(use.mode.session->mutex);
    use.mode.session->forward.add({forward_, *delayed, fp8_dtype(*use.mode.recipe, Role::kInput)});
  }
  return use;
}

Result<Tensor> GemmUnit::input_buffer(const Use& use, int64_t rows) {
  const std::array<int64_t, 2> shape = {rows, spec_.in};
  if (!use.mode.fp8) return Tensor::empty(shape, spec_.activation_dtype, spec_.device);
  return empty_quantized(*use.mode.recipe, Role::kInput, shape,
                         {.rowwise = true, .columnwise = use.training}, spec_.device, *forward_,
                         kInputSlot, use.training);
}

namespace {

Status check_codes(const GemmUnit::Use& use, const Tensor& x, bool columns) {
  const DelayedScaling* delayed = use.mode.delayed();
  if (use.mode.fp8 && delayed != nullptr && (x.has_columnwise() || !columns)) return {};
  return invalid_argument(
      x.describe() +
      " is quantised, which a linear map takes under delayed scaling with room for the copies that "
      "its products read; dequantize it first");
}

}  // namespace

Result<Tensor> GemmUnit::prepare_input(const Use& use, const Tensor& x) {
  if (x.quantized()) {
    TE_FL_RETURN_IF_ERROR(check_codes(use, x, use.training));
    if (use.training) TE_FL_RETURN_IF_ERROR(fill_columns(x));
    return x;
  }
  if (!use.mode.fp8) return cast(x, spec_.activation_dtype);
  TE_FL_ASSIGN_OR_RETURN(Tensor input, input_buffer(use, x.size(0)));
  TE_FL_RETURN_IF_ERROR(quantize(x, input));
  return input;
}

Result<Tensor> GemmUnit::make_weight(const Use& use, bool columnwise) {
  if (!use.mode.fp8) return cast(weight_->value, spec_.activation_dtype);
  TE_FL_ASSIGN_OR_RETURN(Tensor weight,
                         empty_quantized(*use.mode.recipe, Role::kWeight, weight_->value.shape(),
                                         {.rowwise = true, .columnwise = columnwise}, spec_.device,
                                         *forward_, kWeightSlot, use.training));
  TE_FL_RETURN_IF_ERROR(quantize(weight_->value, weight));
  return weight;
}

Result<Tensor> GemmUnit::gemm_weight(const Use& use, const ForwardOptions& options) {
  if (!options.is_first_microbatch.has_value()) return make_weight(use, use.training);
  const bool reusable = cached_weight_.defined() && cached_version_ == weight_->version &&
                        cached_weight_.quantized() == use.mode.fp8 &&
                        (!use.mode.fp8 || (*cached_recipe_ == *use.mode.recipe &&
                                           (cached_weight_.has_columnwise() || !use.training)));
  if (*options.is_first_microbatch || !reusable) {
    TE_FL_ASSIGN_OR_RETURN(cached_weight_, make_weight(use, use.training));
    cached_version_ = weight_->version;
    cached_recipe_ = use.mode.recipe;
  }
  return cached_weight_;
}

Result<Tensor> GemmUnit::forward(Use& use, const Tensor& input, const ForwardOptions& options,
                                 const Tensor* residual, const Tensor* into) {
  if (use.mode.calibrating) {
    TE_FL_RETURN_IF_ERROR(running_amax(input, forward_->amax_slot(kInputSlot)));
    TE_FL_RETURN_IF_ERROR(running_amax(weight_->value, forward_->amax_slot(kWeightSlot)));
  }
  TE_FL_ASSIGN_OR_RETURN(Tensor weight, gemm_weight(use, options));
  Tensor output;
  if (into != nullptr) {
    output = *into;
  } else {
    TE_FL_ASSIGN_OR_RETURN(
        output, Tensor::empty({input.size(0), spec_.out}, spec_.activation_dtype, spec_.device));
  }
  te_fl_generic_gemm_args args{};
  args.a = input;
  args.b = weight;
  args.trans_b = 1;
  args.d = output;
  if (bias_ != nullptr) args.bias = bias_->value;
  if (residual != nullptr) args.residual = *residual;
  args.use_split_accumulator = split_accumulator(use.mode, false);
  TE_FL_RETURN_IF_ERROR(ops::generic_gemm(args, call_options()));
  if (use.training) {
    use.input = input;
    use.weight = weight;
  }
  return output;
}

Result<Tensor> GemmUnit::grad_buffer(const Use& use, int64_t rows) {
  if (const DelayedScaling* delayed = use.mode.delayed()) {
    Context context = Context::current();
    std::lock_guard lock(context.state().mutex);
    context.state().backward.add(
        {backward_, *delayed, fp8_dtype(*use.mode.recipe, Role::kGradient)});
  }
  const std::array<int64_t, 2> shape = {rows, spec_.out};
  return empty_quantized(*use.mode.recipe, Role::kGradient, shape,
                         {.rowwise = true, .columnwise = true}, spec_.device, *backward_, kGradSlot,
                         true);
}

Result<GemmUnit::Gradient> GemmUnit::prepare_grad(const Use& use, const Tensor& dy) {
  Gradient grad;
  if (dy.quantized()) {
    TE_FL_RETURN_IF_ERROR(check_codes(use, dy, true));
    TE_FL_ASSIGN_OR_RETURN(GradTarget dbias, GradTarget::open(bias_.get()));
    TE_FL_RETURN_IF_ERROR(fill_columns(dy, dbias.tensor()));
    TE_FL_RETURN_IF_ERROR(dbias.commit());
    grad.tensor = dy;
    grad.bias_done = true;
    return grad;
  }
  if (!use.mode.fp8) {
    TE_FL_ASSIGN_OR_RETURN(grad.tensor, cast(dy, spec_.activation_dtype));
    return grad;
  }
  TE_FL_ASSIGN_OR_RETURN(grad.tensor, grad_buffer(use, dy.size(0)));
  if (bias_ == nullptr) {
    TE_FL_RETURN_IF_ERROR(quantize(dy, grad.tensor));
    return grad;
  }
  TE_FL_ASSIGN_OR_RETURN(GradTarget dbias, GradTarget::open(bias_.get()));
  te_fl_bgrad_quantize_args args{};
  args.input = dy;
  args.output = grad.tensor;
  args.bias_grad = dbias.tensor();
  TE_FL_RETURN_IF_ERROR(ops::bgrad_quantize(args, call_options()));
  TE_FL_RETURN_IF_ERROR(dbias.commit());
  grad.bias_done = true;
  return grad;
}

Result<Tensor> GemmUnit::dgrad(const Use& use, const Tensor& grad, const Tensor* into) {
  Tensor dx;
  if (into != nullptr) {
    dx = *into;
  } else {
    TE_FL_ASSIGN_OR_RETURN(
        dx, Tensor::empty({grad.size(0), spec_.in}, spec_.activation_dtype, spec_.device));
  }
  te_fl_generic_gemm_args args{};
  args.a = grad;
  args.b = use.weight;
  args.d = dx;
  args.use_split_accumulator = split_accumulator(use.mode, true);
  TE_FL_RETURN_IF_ERROR(ops::generic_gemm(args, call_options()));
  return dx;
}

Status GemmUnit::wgrad(const Use& use, const Gradient& grad) {
  te_fl_generic_gemm_args args{};
  args.a = grad.tensor;
  args.trans_a = 1;
  args.b = use.input;
  args.d = weight_->grad;
  args.accumulate = weight_->grad_written;
  const bool with_bias = bias_ != nullptr && !grad.bias_done;
  if (with_bias) {
    args.bias_grad = bias_->grad;
    args.accumulate_bias_grad = bias_->grad_written;
  }
  args.use_split_accumulator = split_accumulator(use.mode, true);
  TE_FL_RETURN_IF_ERROR(ops::generic_gemm(args, call_options()));
  weight_->grad_written = true;
  if (with_bias) bias_->grad_written = true;
  return {};
}

Result<Tensor> GemmUnit::backward(const Use& use, const Tensor& dy, const Tensor* into) {
  TE_FL_ASSIGN_OR_RETURN(Gradient grad, prepare_grad(use, dy));
  TE_FL_ASSIGN_OR_RETURN(Tensor dx, dgrad(use, grad.tensor, into));
  TE_FL_RETURN_IF_ERROR(wgrad(use, grad));
  return dx;
}

}  // namespace te_fl::nn::detail
