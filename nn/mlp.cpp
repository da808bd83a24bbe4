#include "te_fl/nn/mlp.hpp"

#include <array>

#include "nn/make_gemm.hpp"
#include "nn/norm_core.hpp"
#include "nn/tensor_ops.hpp"
#include "te_fl/environment.hpp"
#include "te_fl/nn/init.hpp"

namespace te_fl::nn {
namespace {

struct ActivationOps {
  std::string_view name;
  OpId forward;
  OpId backward;
  OpId dbias;  // backward fused with the bias gradient; the ungated ones only
  bool gated;
};

constexpr std::array<ActivationOps, 12> kActivations = {{
    {"gelu", op::gelu, op::dgelu, op::dbias_dgelu, false},
    {"qgelu", op::qgelu, op::dqgelu, op::dbias_dqgelu, false},
    {"relu", op::relu, op::drelu, op::dbias_drelu, false},
    {"srelu", op::srelu, op::dsrelu, op::dbias_dsrelu, false},
    {"silu", op::silu, op::dsilu, op::dbias_dsilu, false},
    {"geglu", op::geglu, op::dgeglu, {}, true},
    {"qgeglu", op::qgeglu, op::dqgeglu, {}, true},
    {"reglu", op::reglu, op::dreglu, {}, true},
    {"sreglu", op::sreglu, op::dsreglu, {}, true},
    {"swiglu", op::swiglu, op::dswiglu, {}, true},
    {"glu", op::glu, op::dglu, {}, true},
    {"clamped_swiglu", op::clamped_swiglu, op::clamped_dswiglu, {}, true},
}};

const ActivationOps& ops_of(Activation activation) {
  return kActivations.at(static_cast<size_t>(activation));
}

struct MlpRecord : Ctx::Record {
  detail::NormCore::Saved norm;
  detail::GemmUnit::Use fc1;
  detail::GemmUnit::Use fc2;
  Tensor pre;  // fc1's output, the activation's input
  Shape shape;
};

}  // namespace

bool is_gated(Activation activation) noexcept { return ops_of(activation).gated; }
std::string_view name(Activation activation) noexcept { return ops_of(activation).name; }

Result<Activation> parse_activation(std::string_view text) {
  std::vector<std::string> names;
  for (size_t i = 0; i < kActivations.size(); ++i) {
    if (kActivations[i].name == text) return static_cast<Activation>(i);
    names.emplace_back(kActivations[i].name);
  }
  std::string message = "\"" + std::string(text) + "\" is no activation; ";
  std::string near = environment::nearest(std::string(text), names);
  if (!near.empty()) message += "did you mean " + near + "? ";
  message += "Activations:";
  for (const std::string& n : names) message += " " + n;
  return invalid_argument(std::move(message));
}

struct LayerNormMLP::Impl {
  LayerNormMLPOptions options;
  std::unique_ptr<detail::NormCore> norm;
  std::unique_ptr<detail::GemmUnit> fc1;
  std::unique_ptr<detail::GemmUnit> fc2;

  Status activate(const Tensor& pre, const Tensor& out) const;
  Status activate_backward(const Tensor& grad, const Tensor& pre, const Tensor& out) const;
  // Whether the activation may join the product before it. Scales that derive from the result take
  // a pass over it of their own.
  bool may_join(const detail::GemmUnit::Use& use) const {
    return options.activation == Activation::kGelu &&
           (!use.mode.fp8 || use.mode.delayed() != nullptr);
  }
  // fc1 and the activation of its output, into `activated`.
  Status widen(MlpRecord& record, const Tensor& normed, const ForwardOptions& forward,
               const Tensor& activated);
  // Where the gradient of fc1's output goes: quantised in FP8.
  Result<Tensor> gradient_buffer(const MlpRecord& record);
  // fc2's dgrad and pre_gradient() of it.
  Result<detail::GemmUnit::Gradient> narrow_gradient(const MlpRecord& record, const Tensor& grad);
  Result<detail::GemmUnit::Gradient> pre_gradient(const MlpRecord& record, const Tensor& grad);
};

Status LayerNormMLP::Impl::activate(const Tensor& pre, const Tensor& out) const {
  const OpId id = ops_of(options.activation).forward;
  OpManager& manager = OpManager::instance();
  if (options.activation == Activation::kClampedSwiglu) {
    te_fl_clamped_swiglu_args args{};
    args.input = pre;
    args.output = out;
    args.limit = options.clamp_limit;
    args.alpha = options.clamp_alpha;
    args.glu_linear_offset = options.glu_linear_offset;
    return manager.call(id, &args, detail::call_options(options.device));
  }
  if (is_gated(options.activation)) {
    te_fl_activation_glu_fwd_args args{};
    args.input = pre;
    args.output = out;
    return manager.call(id, &args, detail::call_options(options.device));
  }
  te_fl_activation_act_fwd_args args{};
  args.input = pre;
  args.output = out;
  return manager.call(id, &args, detail::call_options(options.device));
}

Status LayerNormMLP::Impl::activate_backward(const Tensor& grad, const Tensor& pre,
                                             const Tensor& out) const {
  const OpId id = ops_of(options.activation).backward;
  OpManager& manager = OpManager::instance();
  if (options.activation == Activation::kClampedSwiglu) {
    te_fl_clamped_dswiglu_args args{};
    args.grad = grad;
    args.input = pre;
    args.output = out;
    args.limit = options.clamp_limit;
    args.alpha = options.clamp_alpha;
    args.glu_linear_offset = options.glu_linear_offset;
    return manager.call(id, &args, detail::call_options(options.device));
  }
  if (is_gated(options.activation)) {
    te_fl_activation_glu_bwd_args args{};
    args.grad = grad;
    args.input = pre;
    args.output = out;
    return manager.call(id, &args, detail::call_options(options.device));
  }
  te_fl_activation_act_bwd_args args{};
  args.grad = grad;
  args.input = pre;
  args.output = out;
  return manager.call(id, &args, detail::call_options(options.device));
}

Status LayerNormMLP::Impl::widen(MlpRecord& record, const Tensor& normed,
                                 const ForwardOptions& forward, const Tensor& activated) {
  if (may_join(record.fc1)) {
    TE_FL_ASSIGN_OR_RETURN(record.pre, fc1->forward_gelu(record.fc1, normed, forward, activated));
    return {};
  }
  TE_FL_ASSIGN_OR_RETURN(record.pre, fc1->forward(record.fc1, normed, forward));
  return activate(record.pre, activated);
}

Result<Tensor> LayerNormMLP::Impl::gradient_buffer(const MlpRecord& record) {
  if (record.fc1.mode.fp8) return fc1->grad_buffer(record.fc1, record.pre.size(0));
  return detail::empty_like(record.pre, options.activation_dtype);
}

Result<detail::GemmUnit::Gradient> LayerNormMLP::Impl::narrow_gradient(const MlpRecord& record,
                                                                       const Tensor& grad) {
  if (!may_join(record.fc1)) {
    TE_FL_ASSIGN_OR_RETURN(const Tensor d_activated, fc2->dgrad(record.fc2, grad));
    return pre_gradient(record, d_activated);
  }
  detail::GemmUnit::Gradient result;
  TE_FL_ASSIGN_OR_RETURN(result.tensor, gradient_buffer(record));
  TE_FL_ASSIGN_OR_RETURN(auto dbias, detail::GradTarget::open(fc1->bias().get()));
  TE_FL_RETURN_IF_ERROR(
      fc2->dgrad_gelu(record.fc2, grad, record.pre, result.tensor, dbias.tensor()));
  TE_FL_RETURN_IF_ERROR(dbias.commit());
  result.bias_done = true;
  return result;
}

// The gradient of fc1's output, in the form that fc1's backward GEMMs want, by the most fused op
// there is.
Result<detail::GemmUnit::Gradient> LayerNormMLP::Impl::pre_gradient(const MlpRecord& record,
                                                                    const Tensor& grad) {
  const bool fp8 = record.fc1.mode.fp8;
  const bool with_bias = fc1->bias() != nullptr && fc1->bias()->requires_grad;
  if (with_bias ? is_gated(options.activation) : !fp8) {
    TE_FL_ASSIGN_OR_RETURN(Tensor high, detail::empty_like(record.pre, options.activation_dtype));
    TE_FL_RETURN_IF_ERROR(activate_backward(grad, record.pre, high));
    return fc1->prepare_grad(record.fc1, high);
  }
  detail::GemmUnit::Gradient result;
  TE_FL_ASSIGN_OR_RETURN(result.tensor, gradient_buffer(record));
  if (!with_bias) {
    TE_FL_RETURN_IF_ERROR(activate_backward(grad, record.pre, result.tensor));
    return result;
  }
  TE_FL_ASSIGN_OR_RETURN(auto dbias, detail::GradTarget::open(fc1->bias().get()));
  te_fl_activation_dbias_act_args args{};
  args.grad = grad;
  args.input = record.pre;
  args.output = result.tensor;
  args.dbias = dbias.tensor();
  TE_FL_RETURN_IF_ERROR(OpManager::instance().call(ops_of(options.activation).dbias, &args,
                                                   detail::call_options(options.device)));
  TE_FL_RETURN_IF_ERROR(dbias.commit());
  result.bias_done = true;
  return result;
}

LayerNormMLP::LayerNormMLP(const LayerNormMLPOptions& options) : impl_(std::make_unique<Impl>()) {
  impl_->options = options;
}
LayerNormMLP::~LayerNormMLP() = default;

Result<std::unique_ptr<LayerNormMLP>> LayerNormMLP::create(const LayerNormMLPOptions& options) {
  TE_FL_RETURN_IF_ERROR(detail::check_size("LayerNormMLP", "hidden_size", options.hidden_size));
  TE_FL_RETURN_IF_ERROR(
      detail::check_size("LayerNormMLP", "ffn_hidden_size", options.ffn_hidden_size));
  std::unique_ptr<LayerNormMLP> module(new LayerNormMLP(options));
  Impl& impl = *module->impl_;
  TE_FL_ASSIGN_OR_RETURN(
      impl.norm, detail::NormCore::create(options.normalization,
                                          {.hidden_size = options.hidden_size,
                                           .epsilon = options.epsilon,
                                           .zero_centered_gamma = options.zero_centered_gamma,
                                           .param_dtype = options.param_dtype,
                                           .activation_dtype = options.activation_dtype,
                                           .device = options.device}));
  detail::GemmOptions gemm{.module = "LayerNormMLP",
                           .in = options.hidden_size,
                           .out = options.ffn_hidden_size * (is_gated(options.activation) ? 2 : 1),
                           .bias = options.fc1_bias.value_or(options.bias),
                           .param_dtype = options.param_dtype,
                           .activation_dtype = options.activation_dtype,
                           .device = options.device,
                           .seed = init::subseed(options.seed, 1),
                           .init_std = options.init_std};
  TE_FL_ASSIGN_OR_RETURN(impl.fc1, detail::make_gemm(gemm));
  gemm.in = options.ffn_hidden_size;
  gemm.out = options.hidden_size;
  gemm.bias = options.fc2_bias.value_or(options.bias);
  gemm.return_bias = options.return_bias;
  gemm.seed = init::subseed(options.seed, 2);
  gemm.init_std = options.output_init_std;
  TE_FL_ASSIGN_OR_RETURN(impl.fc2, detail::make_gemm(gemm));

  module->register_parameter("layer_norm_weight", impl.norm->weight());
  if (impl.norm->bias()) module->register_parameter("layer_norm_bias", impl.norm->bias());
  module->register_parameter("fc1_weight", impl.fc1->weight());
  if (impl.fc1->bias()) module->register_parameter("fc1_bias", impl.fc1->bias());
  module->register_parameter("fc2_weight", impl.fc2->weight());
  if (impl.fc2->bias()) module->register_parameter("fc2_bias", impl.fc2->bias());
  module->register_fp8("fc1_fp8", impl.fc1->forward_state(), impl.fc1->backward_state());
  module->register_fp8("fc2_fp8", impl.fc2->forward_state(), impl.fc2->backward_state());
  return module;
}

Result<Tensor> LayerNormMLP::forward(const Tensor& x, Ctx* ctx, const ForwardOptions& options,
                                     const Tensor* residual, Tensor* layernorm_output) {
  Impl& impl = *impl_;
  const bool training = ctx != nullptr;
  TE_FL_ASSIGN_OR_RETURN(Tensor flat,
                         detail::as_matrix(x, impl.options.hidden_size, "LayerNormMLP: x"));
  TE_FL_ASSIGN_OR_RETURN(const Tensor added,
                         detail::residual_matrix(residual, x.shape(), impl.options.hidden_size,
                                                 "LayerNormMLP: residual"));
  TE_FL_ASSIGN_OR_RETURN(auto record, detail::new_record<MlpRecord>(ctx, "LayerNormMLP"));
  TE_FL_ASSIGN_OR_RETURN(record->fc1, impl.fc1->begin(training));
  TE_FL_ASSIGN_OR_RETURN(record->fc2, impl.fc2->begin(training));
  TE_FL_ASSIGN_OR_RETURN(Tensor normed, detail::normed_input(*impl.norm, *impl.fc1, record->fc1,
                                                             flat, record->norm, layernorm_output));
  if (layernorm_output != nullptr) {
    TE_FL_ASSIGN_OR_RETURN(*layernorm_output, layernorm_output->view(x.shape()));
  }
  TE_FL_ASSIGN_OR_RETURN(Tensor activated, impl.fc2->input_buffer(record->fc2, flat.size(0)));
  TE_FL_RETURN_IF_ERROR(impl.widen(*record, normed, options, activated));
  normed = Tensor();
  TE_FL_ASSIGN_OR_RETURN(Tensor y, impl.fc2->forward(record->fc2, activated, options,
                                                     added.defined() ? &added : nullptr));
  record->shape.assign(x.shape().begin(), x.shape().end());
  if (training) TE_FL_RETURN_IF_ERROR(ctx->store(this, std::move(record)));
  return y.view(x.shape());
}

Result<Tensor> LayerNormMLP::backward(const Tensor& dy, Ctx& ctx, const Tensor* residual_grad,
                                      const Tensor* layernorm_output_grad) {
  Impl& impl = *impl_;
  TE_FL_ASSIGN_OR_RETURN(auto taken, ctx.take(this, "LayerNormMLP"));
  auto& record = static_cast<MlpRecord&>(*taken);
  const int64_t hidden = impl.options.hidden_size;
  TE_FL_RETURN_IF_ERROR(detail::check_gradient(dy, record.shape, hidden, "LayerNormMLP"));
  TE_FL_RETURN_IF_ERROR(impl.fc2->check_unchanged(record.fc2));
  TE_FL_RETURN_IF_ERROR(impl.fc1->check_unchanged(record.fc1));
  TE_FL_RETURN_IF_ERROR(impl.norm->check_unchanged(record.norm));
  TE_FL_ASSIGN_OR_RETURN(Tensor flat, detail::as_matrix(dy, hidden, "LayerNormMLP: dy"));
  TE_FL_ASSIGN_OR_RETURN(
      const Tensor residual,
      detail::residual_matrix(residual_grad, record.shape, hidden, "LayerNormMLP: residual_grad"));
  TE_FL_ASSIGN_OR_RETURN(const Tensor past,
                         detail::residual_matrix(layernorm_output_grad, record.shape, hidden,
                                                 "LayerNormMLP: layernorm_output_grad"));
  TE_FL_ASSIGN_OR_RETURN(auto d_out, impl.fc2->prepare_grad(record.fc2, flat));
  TE_FL_RETURN_IF_ERROR(impl.fc2->wgrad(record.fc2, d_out));
  record.fc2.input = Tensor();
  TE_FL_ASSIGN_OR_RETURN(auto d_pre, impl.narrow_gradient(record, d_out.tensor));
  record.fc2 = {};
  d_out = {};
  record.pre = Tensor();
  TE_FL_ASSIGN_OR_RETURN(Tensor d_normed, impl.fc1->dgrad(record.fc1, d_pre.tensor));
  TE_FL_RETURN_IF_ERROR(impl.fc1->wgrad(record.fc1, d_pre));
  if (past.defined()) TE_FL_RETURN_IF_ERROR(detail::add(d_normed, past, d_normed));
  TE_FL_ASSIGN_OR_RETURN(Tensor dx, impl.norm->backward(d_normed, record.norm,
                                                        residual.defined() ? &residual : nullptr));
  return dx.view(record.shape);
}

}  // namespace te_fl::nn
