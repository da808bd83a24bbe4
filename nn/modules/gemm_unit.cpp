#include "nn/modules/gemm_unit.hpp"

#include <array>
#include <utility>

#include "nn/autograd/gradients.hpp"
#include "nn/autograd/parameter.hpp"
#include "nn/autograd/recompute.hpp"
#include "nn/base/capture.hpp"
#include "nn/base/run_log.hpp"
#include "nn/base/tensor_ops.hpp"
#include "nn/fp8/custom_operands.hpp"
#include "nn/fp8/fp8_values.hpp"

namespace te_fl::nn::detail {
namespace {

constexpr int64_t kGradSlot = 0;

// True if partial sums are accumulated in full precision: for gradients and with block scaling.
bool split_accumulator(const Fp8Mode& mode, bool gradient) {
  return gradient || (mode.fp8 && std::holds_alternative<Float8BlockScaling>(*mode.recipe));
}

}  // namespace

GemmUnit::GemmUnit(const Spec& spec, std::shared_ptr<Parameter> weight,
                   std::shared_ptr<Parameter> bias)
    : spec_(spec),
      weight_(std::move(weight)),
      bias_(std::move(bias)),
      forward_(std::make_shared<Fp8State>(2, spec.device)),
      backward_(std::make_shared<Fp8State>(1, spec.device)) {
  if (spec_.high_precision) return;
  if (weight_->internals().fp8_values != nullptr) {
    weight_->internals().fp8_values->bind(forward_, kWeightSlot);
    return;
  }
  copy_ = std::make_shared<WeightCopy>(forward_, kWeightSlot);
  // Among modules that share a weight, the first registers its FP8 copy with the parameter; the
  // others quantise the weight themselves.
  if (weight_->internals().fp8_copy.expired()) weight_->internals().fp8_copy = copy_;
}

Result<GemmUnit::Use> GemmUnit::begin(bool training) {
  Use use;
  use.training = training;
  use.wgrad = training && weight_->requires_grad;
  use.version = weight_->version;
  use.dx_dtype = spec_.activation_dtype;
  if (spec_.high_precision) return use;
  TE_FL_ASSIGN_OR_RETURN(use.mode, current_mode());
  const DelayedScaling* delayed = use.mode.delayed();
  if (training) {
    serving_ = {};
    if (copy_ != nullptr) {
      copy_->wanted_by(use.mode.fp8 && delayed != nullptr ? use.mode.recipe : nullptr);
    }
  }
  if (delayed == nullptr || !(use.mode.fp8 || use.mode.calibrating)) return use;
  TE_FL_RETURN_IF_ERROR(begin_delayed(use.mode, training, forward_, backward_));
  use.unscaled = use.mode.fp8 && !training && !forward_->calibrated() && forward_->looks_on();
  if (weight_->value.quantized() && (training || use.mode.calibrating) && !replaying()) {
    // An FP8-only weight is not quantised in a forward: its amax was computed when it was written.
    // Block-scaled weights have no amax.
    const Tensor amax = weight_->value.amax();
    if (amax.defined()) {
      TE_FL_RETURN_IF_ERROR(running_amax(amax, forward_->amax_slot(kWeightSlot)));
    }
  }
  return use;
}

namespace {

// True if an op that produces the input writes it quantised.
bool fuses_input(const GemmUnit::Use& use) {
  return use.mode.fp8 && use.mode.fuses() &&
         !(use.wgrad && use.mode.backward() == BackwardOverride::kHighPrecision);
}

// The copies of the input that a forward needs.
Copies input_copies(const GemmUnit::Use& use) {
  return {.rowwise = true, .columnwise = use.wgrad && use.mode.quantises_gradients()};
}

}  // namespace

Result<Tensor> GemmUnit::input_buffer(const Use& use, int64_t rows) {
  const std::array<int64_t, 2> shape = {rows, spec_.in};
  if (!fuses_input(use)) return Tensor::empty(shape, spec_.activation_dtype, spec_.device);
  return input_codes(use, rows);
}

Result<Tensor> GemmUnit::input_codes(const Use& use, int64_t rows) {
  const std::array<int64_t, 2> shape = {rows, spec_.in};
  return empty_quantized(*use.mode.recipe, Role::kInput, shape, input_copies(use), spec_.device,
                         *forward_, kInputSlot);
}

Result<Tensor> GemmUnit::written_input(Use& use, const Tensor& buffer) {
  return buffer.quantized() ? Result<Tensor>(buffer) : whole_input(use, buffer);
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

Result<Tensor> GemmUnit::prepare_input(Use& use, const Tensor& x) {
  return spec_.input_rows == nullptr ? whole_input(use, x) : gathered_input(use, x);
}

Result<Tensor> GemmUnit::whole_input(Use& use, const Tensor& x) {
  if (!x.quantized()) use.dx_dtype = x.dtype();
  if (x.quantized()) {
    TE_FL_RETURN_IF_ERROR(check_codes(use, x, use.wgrad));
    if (use.wgrad) TE_FL_RETURN_IF_ERROR(fill_columns(x));
    return x;
  }
  if (!use.mode.fp8) return cast(x, spec_.activation_dtype);
  Tensor input;
  if (const CustomScaling* custom = use.mode.custom()) {
    TE_FL_ASSIGN_OR_RETURN(const Tensor values, cast(x, spec_.activation_dtype));
    TE_FL_ASSIGN_OR_RETURN(QuantisedOperand made, quantise_custom(quantisers_of(*custom).input,
                                                                  values, input_copies(use)));
    input = std::move(made.rowwise);
    use.across = use.mode.quantises_gradients() ? std::move(made.columnwise) : input;
  } else {
    TE_FL_ASSIGN_OR_RETURN(input, input_codes(use, x.size(0)));
    TE_FL_RETURN_IF_ERROR(quantize(x, input));
  }
  if (use.wgrad && use.mode.backward() == BackwardOverride::kHighPrecision) {
    TE_FL_ASSIGN_OR_RETURN(use.across, cast(x, spec_.activation_dtype));
  }
  return input;
}

Status GemmUnit::read_kept(Use& use) const {
  const BackwardOverride way = use.mode.backward();
  if (way == BackwardOverride::kNone) {
    TE_FL_RETURN_IF_ERROR(read_nvfp4(use.input));
    return read_nvfp4(use.weight);
  }
  if (use.input.defined() && use.input.quantized()) {
    TE_FL_ASSIGN_OR_RETURN(use.input, dequantised(use.input, spec_.activation_dtype));
  }
  const Tensor weight = weight_of(use);
  if (weight.quantized()) {
    TE_FL_ASSIGN_OR_RETURN(use.weight, dequantised(weight, spec_.activation_dtype));
  } else if (weight.dtype() != spec_.activation_dtype) {
    TE_FL_ASSIGN_OR_RETURN(use.weight, cast(weight, spec_.activation_dtype));
  }
  return {};
}

Result<te_fl_generic_gemm_args> GemmUnit::product(const Use& use, const Tensor& input,
                                                  const ForwardOptions& options, Weight& weight) {
  TE_FL_RETURN_IF_ERROR(same_parameter(weight_.get()));
  TE_FL_RETURN_IF_ERROR(same_parameter(bias_.get()));
  if (use.mode.calibrating && !replaying()) {
    TE_FL_RETURN_IF_ERROR(running_amax(input, forward_->amax_slot(kInputSlot)));
    if (!weight_->value.quantized()) {
      TE_FL_RETURN_IF_ERROR(running_amax(weight_->value, forward_->amax_slot(kWeightSlot)));
    }
  }
  TE_FL_ASSIGN_OR_RETURN(weight, replaying() ? repeated_weight(use) : gemm_weight(use, options));
  if (use.unscaled) {
    const std::string owner = "the linear map of the weight [" + std::to_string(spec_.out) + "," +
                              std::to_string(spec_.in) + "]";
    TE_FL_RETURN_IF_ERROR(warn_if_saturated(*forward_, kInputSlot, input, "inputs", owner));
    TE_FL_RETURN_IF_ERROR(
        warn_if_saturated(*forward_, kWeightSlot, weight.tensor, "weights", owner));
  }
  if (noting() && !replaying()) {
    const auto keeps = [&](const Kept& k) {
      return k.weight.tensor.raw_data() == weight.tensor.raw_data();
    };
    const bool kept = !weight.across.defined() && (keeps(cached_) || keeps(flagged_));
    TE_FL_RETURN_IF_ERROR(note_weight(this, spec_.device, kept ? weight.tensor : Tensor()));
  }
  te_fl_generic_gemm_args args{};
  args.a = input;
  args.b = weight.tensor;
  args.trans_b = 1;
  if (bias_ != nullptr && spec_.adds_bias && spec_.first) args.bias = bias_->value;
  args.use_split_accumulator = split_accumulator(use.mode, false);
  return args;
}

Result<Tensor> GemmUnit::forward(Use& use, const Tensor& input, const ForwardOptions& options,
                                 const Tensor* residual, const Tensor* into) {
  Weight weight;
  Tensor output;
  TE_FL_ASSIGN_OR_RETURN(te_fl_generic_gemm_args args, product(use, input, options, weight));
  if (into != nullptr) {
    output = *into;
  } else {
    TE_FL_ASSIGN_OR_RETURN(
        output, Tensor::empty({input.size(0), spec_.out}, spec_.activation_dtype, spec_.device));
  }
  args.d = output;
  if (use.arriving != nullptr) {
    TE_FL_RETURN_IF_ERROR(product_in_chunks(args, *use.arriving, output, residual));
    use.arriving = nullptr;
  } else {
    if (residual != nullptr) args.residual = *residual;
    TE_FL_RETURN_IF_ERROR(ops::generic_gemm(args, call_options(spec_.device)));
  }
  keep(use, input, weight);
  return output;
}

void GemmUnit::keep(Use& use, const Tensor& input, const Weight& weight) const {
  const Tensor across = std::exchange(use.across, Tensor());
  if (!use.training) return;
  const BackwardOverride way = use.mode.backward();
  const auto read = [way](const Tensor& t) {
    if (!t.quantized()) return t;
    return way == BackwardOverride::kNone ? t.columnwise_only() : t.rowwise_only();
  };
  if (use.wgrad && !use.part.defined()) {
    use.input = across.defined() ? read(across) : read(input);
  }
  if (way == BackwardOverride::kHighPrecision) return;
  if (weight.across.defined()) {
    use.weight = read(weight.across);
  } else if (weight.tensor.raw_data() != weight_->value.raw_data()) {
    use.weight = read(weight.tensor);
  }
}

namespace {

// True if the GEMM fused with its activation runs on the same implementation as the separate calls
// (the GEMM, and `op` for the activation), and this implementation fuses at no extra cost.
Result<bool> joins(const te_fl_generic_gemm_args& joined, const te_fl_generic_gemm_args& product,
                   OpId op, const void* separate, const CallOptions& options) {
  OpManager& manager = OpManager::instance();
  TE_FL_ASSIGN_OR_RETURN(const FirstChoice one,
                         manager.first_choice(op::generic_gemm, &joined, options));
  if ((one.flags & TE_FL_OP_CHEAP_EPILOGUES) == 0) return false;
  TE_FL_ASSIGN_OR_RETURN(const FirstChoice other, manager.first_choice(op, separate, options));
  TE_FL_ASSIGN_OR_RETURN(const FirstChoice alone,
                         manager.first_choice(op::generic_gemm, &product, options));
  return one.impl_id == other.impl_id && one.impl_id == alone.impl_id;
}

}  // namespace

Result<Tensor> GemmUnit::forward_gelu(Use& use, const Tensor& input, const ForwardOptions& options,
                                      const Tensor& activated) {
  Weight weight;
  TE_FL_ASSIGN_OR_RETURN(te_fl_generic_gemm_args args, product(use, input, options, weight));
  TE_FL_ASSIGN_OR_RETURN(
      Tensor pre, Tensor::empty({input.size(0), spec_.out}, spec_.activation_dtype, spec_.device));
  te_fl_gelu_args gelu{};
  gelu.input = pre;
  gelu.output = activated;
  te_fl_generic_gemm_args joined = args;
  joined.gelu = 1;
  joined.pre_gelu_out = pre;
  joined.d = activated;
  args.d = pre;
  bool join = false;
  if (use.arriving == nullptr) {  // row ranges would each have their own amax
    TE_FL_ASSIGN_OR_RETURN(join, joins(joined, args, op::gelu, &gelu, call_options(spec_.device)));
  }
  if (join) {
    TE_FL_RETURN_IF_ERROR(ops::generic_gemm(joined, call_options(spec_.device)));
  } else {
    if (use.arriving != nullptr) {
      TE_FL_RETURN_IF_ERROR(product_in_chunks(args, *use.arriving, pre));
      use.arriving = nullptr;
    } else {
      TE_FL_RETURN_IF_ERROR(ops::generic_gemm(args, call_options(spec_.device)));
    }
    TE_FL_RETURN_IF_ERROR(ops::gelu(gelu, call_options(spec_.device)));
  }
  keep(use, input, weight);
  return pre;
}

Status GemmUnit::check_unchanged(const Use& use) const {
  return !use.weight.defined() ? nn::detail::check_unchanged(*weight_, use.version) : Status();
}

Status check_apart(const Tensor& into, const Tensor& read, const char* what, const char* reader) {
  if (!shares_memory(into, read)) return {};
  return invalid_argument(std::string(what) + " is " + into.describe() + " in the memory of " +
                          reader +
                          ", which is read after it is written; give it memory of its own");
}

Status GemmUnit::check_result(const Use& use, const Tensor& dy, const Tensor& into,
                              const char* what) const {
  if (!into.defined()) return {};
  if (wants_wgrad(use)) {
    for (const Tensor& input : {use.input, use.part}) {
      TE_FL_RETURN_IF_ERROR(check_apart(into, input, what, "the forward's input"));
    }
  }
  TE_FL_RETURN_IF_ERROR(check_apart(into, weight_of(use), what, "the weight"));
  const bool as_it_is =
      dy.quantized() || ((!use.mode.quantises_gradients() || use.mode.custom() != nullptr) &&
                         dy.dtype() == spec_.activation_dtype);
  return as_it_is ? check_apart(into, dy, what, "the output's gradient") : Status();
}

Result<Tensor> GemmUnit::grad_buffer(const Use& use, int64_t rows, bool columnwise) {
  if (use.mode.delayed() != nullptr) {
    // Detects that a new step begins although the scale updates of the previous step were not run:
    // the gradient was cleared, and amaxes are pending. This cannot be detected for a frozen
    // weight, nor for a gradient that a framework has taken out, since its step may continue with
    // this module.
    const std::shared_ptr<GradientUpdates> earlier = weight_->internals().gradient_updates;
    const bool cleared =
        weight_->internals().grad_cleared && *weight_->internals().delayed_wgrads == 0;
    if (backward_->pending() && cleared && earlier != nullptr) {
      TE_FL_RETURN_IF_ERROR(earlier->end());
    }
    TE_FL_RETURN_IF_ERROR(begin_delayed_backward(use.mode, backward_));
    weight_->internals().gradient_updates = use.mode.gradients;
  }
  const std::array<int64_t, 2> shape = {rows, spec_.out};
  return empty_quantized(*use.mode.recipe, Role::kGradient, shape,
                         {.rowwise = true, .columnwise = columnwise}, spec_.device, *backward_,
                         kGradSlot);
}

Result<GemmUnit::Gradient> GemmUnit::prepare_grad(const Use& use, const Tensor& dy,
                                                  bool may_arrive) {
  if (spec_.gradient_rows != nullptr) return gathered_grad(use, dy, may_arrive);
  return whole_grad(use, dy, wants_bias_grad());
}

Result<GemmUnit::Gradient> GemmUnit::whole_grad(const Use& use, const Tensor& dy, bool with_bias) {
  Gradient grad;
  if (dy.quantized()) {
    const bool columns = wants_wgrad(use) || with_bias;  // fill_columns() also sums the columns
    TE_FL_RETURN_IF_ERROR(check_codes(use, dy, columns));
    TE_FL_ASSIGN_OR_RETURN(GradTarget dbias, GradTarget::open(with_bias ? bias_.get() : nullptr));
    if (columns) TE_FL_RETURN_IF_ERROR(fill_columns(dy, dbias.tensor()));
    TE_FL_RETURN_IF_ERROR(dbias.commit());
    grad.tensor = dy;
    grad.bias_done = true;
    return grad;
  }
  if (!use.mode.quantises_gradients()) {
    TE_FL_ASSIGN_OR_RETURN(grad.tensor, cast(dy, spec_.activation_dtype));
    grad.bias_done = !with_bias;
    return grad;
  }
  if (const CustomScaling* custom = use.mode.custom()) {
    TE_FL_ASSIGN_OR_RETURN(const Tensor values, cast(dy, spec_.activation_dtype));
    if (with_bias) TE_FL_RETURN_IF_ERROR(sum_bias_grad(values));
    TE_FL_ASSIGN_OR_RETURN(QuantisedOperand made,
                           quantise_custom(quantisers_of(*custom).gradient, values,
                                           {.rowwise = true, .columnwise = wants_wgrad(use)}));
    grad.tensor = std::move(made.rowwise);
    grad.across = std::move(made.columnwise);
    TE_FL_RETURN_IF_ERROR(read_nvfp4(grad.across));
    grad.bias_done = true;
    return grad;
  }
  TE_FL_ASSIGN_OR_RETURN(grad.tensor, grad_buffer(use, dy.size(0)));
  grad.bias_done = true;
  TE_FL_RETURN_IF_ERROR(with_bias ? quantise_with_bias(dy, grad.tensor)
                                  : quantize(dy, grad.tensor));
  return grad;
}

Status GemmUnit::quantise_with_bias(const Tensor& dy, const Tensor& codes) {
  TE_FL_ASSIGN_OR_RETURN(GradTarget dbias, GradTarget::open(bias_.get()));
  te_fl_bgrad_quantize_args args{};
  args.input = dy;
  args.output = codes;
  args.bias_grad = dbias.tensor();
  TE_FL_RETURN_IF_ERROR(ops::bgrad_quantize(args, call_options(spec_.device)));
  return dbias.commit();
}

Result<Tensor> GemmUnit::dgrad(const Use& use, Gradient& gradient, const Tensor* into) {
  const Tensor& grad = gradient.tensor;
  Tensor dx;
  if (into != nullptr) {
    dx = *into;
  } else {
    TE_FL_ASSIGN_OR_RETURN(dx, Tensor::empty({grad.size(0), spec_.in}, use.dx_dtype, spec_.device));
  }
  te_fl_generic_gemm_args args = dgrad_product(use, grad);
  if (gradient.arriving != nullptr) {
    TE_FL_RETURN_IF_ERROR(product_in_chunks(args, *gradient.arriving, dx));
    TE_FL_RETURN_IF_ERROR(arrived(gradient));
    return dx;
  }
  args.d = dx;
  TE_FL_RETURN_IF_ERROR(ops::generic_gemm(args, call_options(spec_.device)));
  return dx;
}

te_fl_generic_gemm_args GemmUnit::dgrad_product(const Use& use, const Tensor& grad) const {
  te_fl_generic_gemm_args args{};
  args.a = grad;
  args.b = weight_of(use);
  args.use_split_accumulator = split_accumulator(use.mode, true);
  return args;
}

Status GemmUnit::dgrad_gelu(const Use& use, Gradient& gradient, const Tensor& pre,
                            const Tensor& into, const Tensor& sums) {
  const Tensor& grad = gradient.tensor;
  te_fl_generic_gemm_args joined{};
  joined.a = grad;
  joined.b = weight_of(use);
  joined.pre_gelu_in = pre;
  joined.d = into;
  if (sums.defined()) joined.d_sum = sums;
  joined.use_split_accumulator = split_accumulator(use.mode, true);
  // Finds out which implementations accept the separate calls. Their intermediate tensor need not
  // exist for that; any tensor of its shape and dtype can stand in for it.
  te_fl_generic_gemm_args product = joined;
  product.pre_gelu_in = product.d_sum = nullptr;
  product.d = pre;
  te_fl_dgelu_args plain{};
  plain.grad = plain.input = pre;
  plain.output = into;
  te_fl_dbias_dgelu_args with_sums{};
  with_sums.grad = with_sums.input = pre;
  with_sums.output = into;
  if (sums.defined()) with_sums.dbias = sums;
  const CallOptions options = call_options(spec_.device);
  bool join = false;
  if (gradient.arriving == nullptr) {
    TE_FL_ASSIGN_OR_RETURN(join, sums.defined()
                                     ? joins(joined, product, op::dbias_dgelu, &with_sums, options)
                                     : joins(joined, product, op::dgelu, &plain, options));
  }
  if (join) return ops::generic_gemm(joined, options);
  TE_FL_ASSIGN_OR_RETURN(const Tensor between, dgrad(use, gradient));
  plain.grad = with_sums.grad = between;
  return sums.defined() ? ops::dbias_dgelu(with_sums, options) : ops::dgelu(plain, options);
}

Status GemmUnit::sum_bias_grad(const Tensor& dy) {
  TE_FL_ASSIGN_OR_RETURN(const Tensor ones,
                         Tensor::empty({1, dy.size(0)}, dy.dtype(), spec_.device));
  TE_FL_RETURN_IF_ERROR(fill(ones, 1));
  te_fl_generic_gemm_args args{};
  args.a = ones;
  args.b = dy;
  TE_FL_ASSIGN_OR_RETURN(args.accumulate, adds(*bias_));
  TE_FL_ASSIGN_OR_RETURN(const Tensor sums, bias_->grad.view({1, spec_.out}));
  args.d = sums;
  args.use_split_accumulator = true;
  TE_FL_RETURN_IF_ERROR(ops::generic_gemm(args, call_options(spec_.device)));
  wrote(*bias_);
  return {};
}

Status GemmUnit::wgrad(const Use& use, const Gradient& grad, const Tensor& input) {
  if (!delayed_->enabled()) return run_wgrad(use, grad, input);
  Use read = use;
  read.weight = read.part = read.input = Tensor();
  Gradient kept = grad;
  settle(read, kept);
  std::vector<DelayedCount> counts;
  count_left(read, kept, counts);
  auto left = std::make_shared<LeftGradients>(std::move(counts));
  delayed_->add([this, read = std::move(read), kept = std::move(kept), input, left] {
    left->end();
    return run_wgrad(read, kept, input);
  });
  return {};
}

void GemmUnit::settle(Use& use, Gradient& grad) const {
  use.wgrad = wants_wgrad(use);
  grad.bias_done = grad.bias_done || !wants_bias_grad();
}

void GemmUnit::count_left(const Use& use, const Gradient& grad,
                          std::vector<DelayedCount>& counts) const {
  if (use.wgrad) counts.push_back(weight_->internals().delayed_wgrads);
  if (!grad.bias_done) counts.push_back(bias_->internals().delayed_wgrads);
}

Status GemmUnit::run_wgrad(const Use& use, const Gradient& grad, const Tensor& input) {
  TE_FL_ASSIGN_OR_RETURN(const auto args, wgrad_product(use, grad, input));
  if (!args.has_value()) return {};
  TE_FL_RETURN_IF_ERROR(ops::generic_gemm(*args, call_options(spec_.device)));
  wrote_wgrad(*args);
  return {};
}

Result<std::optional<te_fl_generic_gemm_args>> GemmUnit::wgrad_product(const Use& use,
                                                                       const Gradient& grad,
                                                                       const Tensor& input) {
  const bool with_bias = !grad.bias_done && wants_bias_grad();
  if (!wants_wgrad(use)) {
    if (with_bias) TE_FL_RETURN_IF_ERROR(sum_bias_grad(grad.tensor));
    return std::optional<te_fl_generic_gemm_args>();
  }
  te_fl_generic_gemm_args args{};
  args.a = grad.across.defined() ? grad.across : grad.tensor;
  args.trans_a = 1;
  args.b = input;
  TE_FL_ASSIGN_OR_RETURN(args.accumulate, adds(*weight_));
  args.d = weight_->grad;
  if (with_bias) {
    TE_FL_ASSIGN_OR_RETURN(args.accumulate_bias_grad, adds(*bias_));
    args.bias_grad = bias_->grad;
  }
  args.use_split_accumulator = split_accumulator(use.mode, true);
  return std::optional(args);
}

void GemmUnit::wrote_wgrad(const te_fl_generic_gemm_args& product) {
  wrote(*weight_);
  if (product.bias_grad != nullptr) wrote(*bias_);
}

}  // namespace te_fl::nn::detail
