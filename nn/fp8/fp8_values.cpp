#include "nn/fp8/fp8_values.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include "core/tensor/tensor_access.hpp"
#include "nn/base/tensor_ops.hpp"
#include "te_fl/device.hpp"

namespace te_fl::nn {
namespace detail {
namespace {

thread_local Fp8Init* t_init = nullptr;

Status check_recipe(const Recipe& recipe) {
  TE_FL_RETURN_IF_ERROR(validate(recipe));
  if (!std::holds_alternative<Float8BlockScaling>(recipe)) return {};
  return invalid_argument("quantized_model_init: the recipe is " + describe(recipe) +
                          "; parameters of codes alone are scaled by tensor: use DelayedScaling or "
                          "Float8CurrentScaling");
}

// A view of the tensor with current scaling: ops that write it compute the scale from the amax of
// the new data.
Tensor deriving(const Tensor& value) {
  Tensor tensor = value;
  te_fl_quant quant = Tensor::Access::quant(tensor);
  quant.flags |= TE_FL_QUANT_COMPUTE_SCALE;
  Tensor::Access::set_quant(tensor, quant, Tensor::Access::quant_storage(value));
  return tensor;
}

Status copy_bytes(const Tensor& from, const Tensor& to) {
  const Device device = to.device();
  return devices::copy(device, to.raw_data(), from.device(), from.raw_data(),
                       static_cast<size_t>(bytes_for(to.dtype(), to.numel())),
                       devices::current_stream(device));
}

}  // namespace

const Fp8Init* current_fp8_init() noexcept {
  return t_init != nullptr && t_init->options.enabled ? t_init : nullptr;
}

void Fp8Values::bind(std::shared_ptr<Fp8State> state, int64_t slot) {
  if (state_ != nullptr) return;
  state_ = std::move(state);
  slot_ = slot;
}

Status Fp8Values::write(const Tensor& high, const Tensor& value, bool own_scale) const {
  const bool delayed = std::holds_alternative<DelayedScaling>(recipe_);
  const bool scaled = state_ != nullptr && state_->defined() && state_->calibrated();
  if (!delayed || !scaled || own_scale) return quantize(high, deriving(value));
  TE_FL_RETURN_IF_ERROR(copy(state_->scale_slot(slot_), value.scale()));
  TE_FL_RETURN_IF_ERROR(fill(value.amax(), 0));
  return quantize(high, value);
}

Status load_codes(const Tensor& codes, const Tensor& scale_inv, const Tensor& amax,
                  const Tensor& value) {
  TE_FL_RETURN_IF_ERROR(copy_bytes(codes, value.rowwise_codes()));
  TE_FL_RETURN_IF_ERROR(copy(scale_inv, value.scale_inv()));
  if (value.has_columnwise()) TE_FL_RETURN_IF_ERROR(fill_columns(value));
  if (amax.defined()) return copy(amax, value.amax());
  TE_FL_ASSIGN_OR_RETURN(const Tensor high, empty_like(value, DType::kF32));
  TE_FL_RETURN_IF_ERROR(copy_values(value, high));
  te_fl_compute_amax_args args{};
  args.input = high;
  const Tensor found = value.amax();
  args.amax = found;
  return ops::compute_amax(args, call_options(value.device()));
}

Result<Tensor> wrap_codes(const Tensor& value) {
  return Tensor::wrap(value.raw_data(), value.shape(), {}, value.dtype(), value.device(),
                      std::make_shared<Tensor>(value));
}

Result<Tensor> with_columns(const Tensor& value) {
  const te_fl_quant& quant = Tensor::Access::quant(value);
  QuantSpec spec;
  spec.dtype = value.dtype();
  spec.columnwise = true;
  spec.pow2_scale = (quant.flags & TE_FL_QUANT_POW2_SCALE) != 0;
  spec.amax_epsilon = quant.amax_epsilon;
  TE_FL_ASSIGN_OR_RETURN(Tensor both, Tensor::empty_quantized(value.shape(), spec, value.device()));
  TE_FL_RETURN_IF_ERROR(copy_bytes(value.rowwise_codes(), both.rowwise_codes()));
  TE_FL_RETURN_IF_ERROR(copy(value.scale_inv(), both.scale_inv()));
  TE_FL_RETURN_IF_ERROR(copy(value.scale(), both.scale()));
  TE_FL_RETURN_IF_ERROR(copy(value.amax(), both.amax()));
  TE_FL_RETURN_IF_ERROR(fill_columns(both));
  return both;
}

Status copy_values(const Tensor& value, const Tensor& out) {
  if (!value.quantized()) return copy(value, out);
  te_fl_dequantize_args args{};
  args.input = value;
  args.output = out;
  return ops::dequantize(args, call_options(out.device()));
}

}  // namespace detail

quantized_model_init::quantized_model_init(QuantizedModelInitOptions options)
    : init_(std::make_unique<detail::Fp8Init>()) {
  init_->invalid = detail::check_recipe(options.recipe);
  init_->options = std::move(options);
  init_->outer = std::exchange(detail::t_init, init_.get());
}
quantized_model_init::~quantized_model_init() { detail::t_init = init_->outer; }

}  // namespace te_fl::nn
