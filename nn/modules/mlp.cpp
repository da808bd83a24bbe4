#include "te_fl/nn/modules/mlp.hpp"

#include <string>
#include <utility>

#include "nn/autograd/ctx.hpp"
#include "nn/autograd/gradients.hpp"
#include "nn/base/tensor_ops.hpp"
#include "nn/modules/activation.hpp"
#include "nn/modules/make_gemm.hpp"
#include "nn/modules/norm_core.hpp"
#include "nn/modules/tensor_parallel.hpp"
#include "te_fl/nn/modules/init.hpp"

namespace te_fl::nn {
namespace {

struct MlpRecord : Ctx::Record {
  detail::NormCore::Saved norm;
  detail::GemmUnit::Use fc1;
  detail::GemmUnit::Use fc2;
  Tensor pre;  // output of fc1, input of the activation
  Shape shape;
  void visit_tensors(const Ctx::Visitor& visitor) {
    norm.visit_tensors(visitor);
    fc1.visit_tensors(visitor);
    fc2.visit_tensors(visitor);
    visitor(pre);
  }
};

}  // namespace

struct LayerNormMLP::Impl {
  LayerNormMLPOptions options;
  TensorParallel parallel;  // empty if nothing is sharded
  std::unique_ptr<detail::NormCore> norm;
  std::unique_ptr<detail::GemmUnit> fc1;
  std::unique_ptr<detail::GemmUnit> fc2;

  Status activate(const Tensor& pre, const Tensor& out) const {
    return detail::activate(activation(), pre, out);
  }
  Status activate_backward(const Tensor& grad, const Tensor& pre, const Tensor& out) const {
    return detail::activate_backward(activation(), grad, pre, out);
  }
  ActivationOptions activation() const {
    return {options.activation, options.clamp_limit, options.clamp_alpha,
            options.glu_linear_offset};
  }
  // True if the activation may be fused with the GEMM before it. False with current scaling, whose
  // scale is computed from the result in a separate pass.
  bool may_join(const detail::GemmUnit::Use& use) const {
    return options.activation == Activation::kGelu &&
           (!use.mode.fp8 || use.mode.delayed() != nullptr);
  }
  // The input of fc1; see LayerNormMLP::forward().
  Result<Tensor> normed(MlpRecord& record, const Tensor& x, Tensor* layernorm_output) const;
  // Runs fc1 and the activation; writes the activation's output to `activated`.
  Status widen(MlpRecord& record, const Tensor& normed, const ForwardOptions& forward,
               const Tensor& activated);
  // Allocates the gradient of fc1's output: quantised under FP8.
  Result<Tensor> gradient_buffer(const MlpRecord& record);
  // Runs fc2's dgrad, followed by pre_gradient().
  Result<detail::GemmUnit::Gradient> narrow_gradient(const MlpRecord& record,
                                                     detail::GemmUnit::Gradient& grad);
  Result<detail::GemmUnit::Gradient> pre_gradient(const MlpRecord& record, const Tensor& grad);
};

Result<Tensor> LayerNormMLP::Impl::normed(MlpRecord& record, const Tensor& x,
                                          Tensor* layernorm_output) const {
  if (norm) {
    return detail::normed_input(*norm, *fc1, record.fc1, x, record.norm, layernorm_output,
                                parallel);
  }
  if (layernorm_output != nullptr) {
    return invalid_argument(
        "LayerNormMLP: layernorm_output is wanted and normalizes is false; x itself is normalised");
  }
  return fc1->prepare_input(record.fc1, x);
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
  if (record.fc1.mode.quantises_gradients()) {
    return fc1->grad_buffer(record.fc1, record.pre.size(0));
  }
  return detail::empty_like(record.pre, options.activation_dtype);
}

Result<detail::GemmUnit::Gradient> LayerNormMLP::Impl::narrow_gradient(
    const MlpRecord& record, detail::GemmUnit::Gradient& grad) {
  if (!may_join(record.fc1)) {
    TE_FL_ASSIGN_OR_RETURN(const Tensor d_activated, fc2->dgrad(record.fc2, grad));
    return pre_gradient(record, d_activated);
  }
  detail::GemmUnit::Gradient result;
  TE_FL_ASSIGN_OR_RETURN(result.tensor, gradient_buffer(record));
  TE_FL_ASSIGN_OR_RETURN(auto dbias, detail::GradTarget::open(fc1->bias().get()));
  Tensor sums = dbias.tensor();
  if (!sums.defined() && fc1->bias() != nullptr) {  // frozen; dx must not depend on that
    TE_FL_ASSIGN_OR_RETURN(sums, detail::empty_like(fc1->bias()->value, DType::kF32));
  }
  TE_FL_RETURN_IF_ERROR(fc2->dgrad_gelu(record.fc2, grad, record.pre, result.tensor, sums));
  TE_FL_RETURN_IF_ERROR(dbias.commit());
  result.bias_done = true;
  return result;
}

// The gradient of fc1's output in the form that fc1's backward GEMMs read. Uses the most fused op
// available.
Result<detail::GemmUnit::Gradient> LayerNormMLP::Impl::pre_gradient(const MlpRecord& record,
                                                                    const Tensor& grad) {
  const bool fp8 = record.fc1.mode.quantises_gradients();
  const bool separate = fp8 && !detail::GemmUnit::fuses_gradient(record.fc1);
  // A frozen bias takes the same path as a trained one, so that the gradient of x is the same.
  const bool has_bias = fc1->bias() != nullptr;
  if (separate || (has_bias ? is_gated(options.activation) : !fp8)) {
    TE_FL_ASSIGN_OR_RETURN(Tensor high, detail::empty_like(record.pre, options.activation_dtype));
    TE_FL_RETURN_IF_ERROR(activate_backward(grad, record.pre, high));
    return fc1->prepare_grad(record.fc1, high);
  }
  detail::GemmUnit::Gradient result;
  TE_FL_ASSIGN_OR_RETURN(result.tensor, gradient_buffer(record));
  result.bias_done = true;
  if (!has_bias || !fc1->bias()->requires_grad) {
    TE_FL_RETURN_IF_ERROR(activate_backward(grad, record.pre, result.tensor));
    return result;
  }
  TE_FL_ASSIGN_OR_RETURN(auto dbias, detail::GradTarget::open(fc1->bias().get()));
  te_fl_activation_dbias_act_args args{};
  args.grad = grad;
  args.input = record.pre;
  args.output = result.tensor;
  args.dbias = dbias.tensor();
  TE_FL_RETURN_IF_ERROR(OpManager::instance().call(detail::activation_ops(options.activation).dbias,
                                                   &args, detail::call_options(options.device)));
  TE_FL_RETURN_IF_ERROR(dbias.commit());
  return result;
}

LayerNormMLP::LayerNormMLP(const LayerNormMLPOptions& options) : impl_(std::make_unique<Impl>()) {
  impl_->options = options;
  if (options.parallel.divides()) impl_->parallel = options.parallel;
}
LayerNormMLP::~LayerNormMLP() = default;

namespace {

Result<init::Shard> fc1_shard(const LayerNormMLPOptions& o) {
  const int64_t whole = o.ffn_whole, rows = o.ffn_hidden_size;
  if (whole == 0 && o.ffn_begin == 0) return init::Shard{};
  if (o.ffn_begin < 0 || o.ffn_begin > whole - rows) {
    return invalid_argument("LayerNormMLP: ffn_begin is " + std::to_string(o.ffn_begin) +
                            " and ffn_whole " + std::to_string(whole) +
                            "; ffn_begin + ffn_hidden_size, which is " + std::to_string(rows) +
                            ", must be at most ffn_whole");
  }
  if (!is_gated(o.activation)) return init::Shard{{whole, o.hidden_size}, {o.ffn_begin, 0}};
  return init::Shard{
      {2 * whole, o.hidden_size}, {0, 0}, {{o.ffn_begin, rows}, {whole + o.ffn_begin, rows}}};
}

}  // namespace

Result<LayerNormMLPOptions> shard_of(LayerNormMLPOptions whole, const TensorParallel& parallel) {
  whole.parallel = parallel;
  if (!parallel.divides()) return whole;
  if (whole.ffn_whole != 0 || whole.ffn_hidden_size % parallel.size() != 0) {
    return invalid_argument("LayerNormMLP: ffn_hidden_size is " +
                            std::to_string(whole.ffn_hidden_size) +
                            "; it must be a multiple of the number of tensor-parallel ranks, which "
                            "is " +
                            std::to_string(parallel.size()) + ", and ffn_whole must be 0");
  }
  whole.ffn_whole = whole.ffn_hidden_size;
  whole.ffn_hidden_size /= parallel.size();
  whole.ffn_begin = parallel.rank() * whole.ffn_hidden_size;
  return whole;
}

Result<std::unique_ptr<LayerNormMLP>> LayerNormMLP::create(const LayerNormMLPOptions& options) {
  TE_FL_RETURN_IF_ERROR(detail::check_size("LayerNormMLP", "hidden_size", options.hidden_size));
  TE_FL_RETURN_IF_ERROR(
      detail::check_size("LayerNormMLP", "ffn_hidden_size", options.ffn_hidden_size));
  std::unique_ptr<LayerNormMLP> module(new LayerNormMLP(options));
  Impl& impl = *module->impl_;
  if (options.normalizes) {
    TE_FL_ASSIGN_OR_RETURN(
        impl.norm, detail::NormCore::create(options.normalization,
                                            {.hidden_size = options.hidden_size,
                                             .epsilon = options.epsilon,
                                             .zero_centered_gamma = options.zero_centered_gamma,
                                             .param_dtype = options.param_dtype,
                                             .activation_dtype = options.activation_dtype,
                                             .device = options.device}));
  }
  detail::GemmOptions gemm{.module = "LayerNormMLP",
                           .in = options.hidden_size,
                           .out = options.ffn_hidden_size * (is_gated(options.activation) ? 2 : 1),
                           .bias = options.fc1_bias.value_or(options.bias),
                           .param_dtype = options.param_dtype,
                           .activation_dtype = options.activation_dtype,
                           .device = options.device,
                           .seed = init::subseed(options.seed, 1),
                           .init_std = options.init_std};
  gemm.input_rows = detail::make_sequence_ranks(options.parallel);
  TE_FL_ASSIGN_OR_RETURN(gemm.shard, fc1_shard(options));
  TE_FL_ASSIGN_OR_RETURN(impl.fc1, detail::make_gemm(gemm));
  gemm.gradient_rows = std::exchange(gemm.input_rows, nullptr);
  gemm.in = options.ffn_hidden_size;
  gemm.out = options.hidden_size;
  gemm.bias = options.fc2_bias.value_or(options.bias);
  gemm.is_fc2 = true;
  gemm.return_bias = options.return_bias;
  gemm.seed = init::subseed(options.seed, 2);
  gemm.init_std = options.output_init_std;
  gemm.partial = options.parallel.divides();
  gemm.first = options.parallel.rank() == 0;
  gemm.shard = {};
  if (options.ffn_whole != 0) {
    gemm.shard = {{options.hidden_size, options.ffn_whole}, {0, options.ffn_begin}};
  }
  TE_FL_ASSIGN_OR_RETURN(impl.fc2, detail::make_gemm(gemm));
  detail::mark_partial(options.parallel, impl.fc2->bias().get());

  if (impl.norm) {
    detail::mark_partial(options.parallel, impl.norm->weight().get());
    detail::mark_partial(options.parallel, impl.norm->bias().get());
    module->register_parameter("layer_norm_weight", impl.norm->weight());
    if (impl.norm->bias()) module->register_parameter("layer_norm_bias", impl.norm->bias());
  }
  module->register_parameter("fc1_weight", impl.fc1->weight());
  if (impl.fc1->bias()) module->register_parameter("fc1_bias", impl.fc1->bias());
  module->register_parameter("fc2_weight", impl.fc2->weight());
  if (impl.fc2->bias()) module->register_parameter("fc2_bias", impl.fc2->bias());
  module->register_fp8("fc1_fp8", impl.fc1->forward_state(), impl.fc1->backward_state());
  module->register_fp8("fc2_fp8", impl.fc2->forward_state(), impl.fc2->backward_state());
  module->register_delayed(impl.fc1->delayed());
  module->register_delayed(impl.fc2->delayed());
  return module;
}

Result<Tensor> LayerNormMLP::forward(const Tensor& x, Ctx* ctx, const ForwardOptions& options,
                                     const Tensor* residual, Tensor* layernorm_output) {
  TE_FL_ASSIGN_OR_RETURN(auto record, detail::new_record<MlpRecord>(ctx, "LayerNormMLP"));
  Impl& impl = *impl_;
  const bool training = ctx != nullptr;
  TE_FL_ASSIGN_OR_RETURN(Tensor flat,
                         detail::as_matrix(x, impl.options.hidden_size, "LayerNormMLP: x"));
  TE_FL_ASSIGN_OR_RETURN(const Tensor added,
                         detail::residual_matrix(residual, x.shape(), impl.options.hidden_size,
                                                 "LayerNormMLP: residual"));
  TE_FL_ASSIGN_OR_RETURN(record->fc1, impl.fc1->begin(training));
  TE_FL_ASSIGN_OR_RETURN(record->fc2, impl.fc2->begin(training));
  TE_FL_ASSIGN_OR_RETURN(Tensor normed, impl.normed(*record, flat, layernorm_output));
  if (layernorm_output != nullptr) {
    TE_FL_ASSIGN_OR_RETURN(*layernorm_output, layernorm_output->view(x.shape()));
  }
  TE_FL_ASSIGN_OR_RETURN(Tensor activated, impl.fc2->input_buffer(record->fc2, normed.size(0)));
  TE_FL_RETURN_IF_ERROR(impl.widen(*record, normed, options, activated));
  normed = Tensor();
  TE_FL_ASSIGN_OR_RETURN(activated, impl.fc2->written_input(record->fc2, activated));
  Tensor y;
  if (impl.parallel.divides()) {
    TE_FL_ASSIGN_OR_RETURN(
        y, detail::forward_summed(*impl.fc2, impl.parallel, record->fc2, activated, options));
    if (added.defined()) TE_FL_RETURN_IF_ERROR(detail::add(y, added, y));
  } else {
    TE_FL_ASSIGN_OR_RETURN(
        y, impl.fc2->forward(record->fc2, activated, options, added.defined() ? &added : nullptr));
  }
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
  if (impl.norm) TE_FL_RETURN_IF_ERROR(impl.norm->check_unchanged(record.norm));
  TE_FL_RETURN_IF_ERROR(impl.fc2->read_kept(record.fc2));
  TE_FL_RETURN_IF_ERROR(impl.fc1->read_kept(record.fc1));
  TE_FL_ASSIGN_OR_RETURN(Tensor flat, detail::as_matrix(dy, hidden, "LayerNormMLP: dy"));
  TE_FL_ASSIGN_OR_RETURN(
      const Tensor residual,
      detail::residual_matrix(residual_grad, record.shape, hidden, "LayerNormMLP: residual_grad"));
  TE_FL_ASSIGN_OR_RETURN(const Tensor past,
                         detail::residual_matrix(layernorm_output_grad, record.shape, hidden,
                                                 "LayerNormMLP: layernorm_output_grad"));
  TE_FL_ASSIGN_OR_RETURN(auto d_out, impl.fc2->prepare_grad(record.fc2, flat, true));
  detail::GemmUnit::Gradient d_pre;
  // Runs wgrad before dgrad, since wgrad is the last use of fc2's input, which is then freed. If
  // the gradient is still being gathered, runs dgrad first, since wgrad needs all ranks' rows.
  const bool arriving = d_out.arriving != nullptr;
  if (arriving) {
    TE_FL_ASSIGN_OR_RETURN(d_pre, impl.narrow_gradient(record, d_out));
  }
  TE_FL_RETURN_IF_ERROR(impl.fc2->wgrad(record.fc2, d_out));
  record.fc2.input = Tensor();
  if (!arriving) {
    TE_FL_ASSIGN_OR_RETURN(d_pre, impl.narrow_gradient(record, d_out));
  }
  record.fc2 = {};
  d_out = {};
  record.pre = Tensor();
  record.fc1.dgrad = ctx.input_grad || (impl.norm && impl.norm->trains());
  TE_FL_ASSIGN_OR_RETURN(Tensor d_normed, impl.fc1->products(record.fc1, d_pre));
  if (!record.fc1.dgrad) return d_normed;
  if (!impl.parallel.divides_sequence()) {
    TE_FL_ASSIGN_OR_RETURN(d_normed, detail::summed(impl.parallel, d_normed));
  }
  if (past.defined()) TE_FL_RETURN_IF_ERROR(detail::add(d_normed, past, d_normed));
  if (!impl.norm) {
    if (residual.defined()) TE_FL_RETURN_IF_ERROR(detail::add(d_normed, residual, d_normed));
    return d_normed.view(record.shape);
  }
  TE_FL_ASSIGN_OR_RETURN(Tensor dx, impl.norm->backward(d_normed, record.norm,
                                                        residual.defined() ? &residual : nullptr));
  return dx.view(record.shape);
}

}  // namespace te_fl::nn
