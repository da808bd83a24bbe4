#include "nn/modules/make_gemm.hpp"

#include <algorithm>
#include <string>

#include "nn/autograd/parameter.hpp"
#include "nn/fp8/fp8_values.hpp"
#include "te_fl/nn/modules/init.hpp"

namespace te_fl::nn::detail {

Status check_size(std::string_view module, std::string_view field, int64_t value) {
  if (value >= 1) return {};
  return invalid_argument(std::string(module) + ": " + std::string(field) + " is " +
                          std::to_string(value) + "; it must be at least 1");
}

Status check_dropout(std::string_view module, std::string_view field, float p) {
  if (p >= 0 && p < 1) return {};
  return invalid_argument(std::string(module) + ": " + std::string(field) + " is " +
                          std::to_string(p) + "; it must be at least 0 and less than 1");
}

namespace {

// Makes an FP8-only parameter on `device` from `high`, which is in host memory.
Result<std::shared_ptr<Parameter>> make_fp8_only(const Parameter& high, const Fp8Init& init,
                                                 const Device& device) {
  QuantSpec spec;
  if (const auto* current = std::get_if<Float8CurrentScaling>(&init.options.recipe)) {
    spec.pow2_scale = current->pow2_scale;
    spec.amax_epsilon = current->amax_epsilon;
  }
  auto parameter = std::make_shared<Parameter>();
  parameter->shard = high.shard;
  parameter->internals().fp8_values = std::make_shared<Fp8Values>(init.options.recipe);
  TE_FL_ASSIGN_OR_RETURN(parameter->value, Tensor::empty_quantized(high.value.shape(), spec));
  TE_FL_RETURN_IF_ERROR(parameter->internals().fp8_values->write(high.value, parameter->value));
  if (init.options.preserve_high_precision_init_val) parameter->initial_value = high.value;
  if (!device.is_host()) {
    TE_FL_ASSIGN_OR_RETURN(parameter->value, parameter->value.to(device));
  }
  return parameter;
}

// Makes a new weight; FP8-only inside a quantized_model_init scope.
Result<std::shared_ptr<Parameter>> make_weight(const GemmOptions& options, const Shape& shape) {
  const Fp8Init* fp8 = options.high_precision ? nullptr : current_fp8_init();
  TE_FL_ASSIGN_OR_RETURN(
      std::shared_ptr<Parameter> weight,
      init::normal(shape, options.init_std, init::subseed(options.seed, 0), options.param_dtype,
                   fp8 == nullptr ? options.device : Device(), options.shard));
  if (fp8 == nullptr) return weight;
  TE_FL_RETURN_IF_ERROR(fp8->invalid);
  if (weight->value.raw_data() == nullptr) {
    return invalid_argument(std::string(options.module) +
                            ": quantized_model_init and init::WithoutValues are both open; "
                            "parameters to be borrowed are in high precision: close one of them");
  }
  return make_fp8_only(*weight, *fp8, options.device);
}

}  // namespace

Result<std::unique_ptr<GemmUnit>> make_gemm(const GemmOptions& options) {
  TE_FL_RETURN_IF_ERROR(check_size(options.module, "in_features", options.in));
  TE_FL_RETURN_IF_ERROR(check_size(options.module, "out_features", options.out));
  if (!is_high(options.activation_dtype)) {
    return invalid_argument(std::string(options.module) + ": activation_dtype is " +
                            std::string(name(options.activation_dtype)) +
                            "; it must be f32, bf16 or f16");
  }
  const Shape shape = {options.out, options.in};
  std::shared_ptr<Parameter> weight = options.tied_weight;
  if (weight == nullptr) {
    TE_FL_ASSIGN_OR_RETURN(weight, make_weight(options, shape));
  } else if (!std::ranges::equal(weight->value.shape(), shape)) {
    return invalid_argument(std::string(options.module) + ": tied_weight is " +
                            weight->value.describe() + "; it must have the shape [" +
                            std::to_string(options.out) + "," + std::to_string(options.in) + "]");
  }
  std::shared_ptr<Parameter> bias;
  if (options.bias) {
    TE_FL_ASSIGN_OR_RETURN(
        bias, init::constant(Shape{options.out}, 0, options.param_dtype, options.device));
    if (!options.shard.whole.empty() && options.shard.whole.front() != options.out) {
      bias->shard = {
          {options.shard.whole.front()}, {options.shard.begin.front()}, options.shard.rows};
    }
  }
  GemmUnit::Spec spec;
  spec.in = options.in;
  spec.out = options.out;
  spec.activation_dtype = options.activation_dtype;
  spec.device = options.device;
  spec.high_precision = options.high_precision;
  spec.adds_bias = !options.return_bias;
  spec.is_fc2 = options.is_fc2;
  spec.partial = options.partial;
  spec.first = options.first;
  spec.input_rows = options.input_rows;
  spec.gradient_rows = options.gradient_rows;
  return std::make_unique<GemmUnit>(spec, std::move(weight), std::move(bias));
}

}  // namespace te_fl::nn::detail
