#include "nn/modules/norm_core.hpp"

#include "nn/autograd/ctx.hpp"
#include "nn/autograd/gradients.hpp"
#include "nn/autograd/recompute.hpp"
#include "nn/base/tensor_ops.hpp"
#include "nn/modules/tensor_parallel.hpp"
#include "te_fl/nn/modules/init.hpp"

namespace te_fl::nn {
namespace detail {

Result<std::unique_ptr<NormCore>> NormCore::create(Normalization kind, const NormOptions& options) {
  if (options.hidden_size < 1) {
    return invalid_argument("norm: hidden_size is " + std::to_string(options.hidden_size) +
                            "; it must be at least 1");
  }
  if (!(options.epsilon >= 0)) {
    return invalid_argument("norm: epsilon is " + std::to_string(options.epsilon) +
                            "; it must be at least 0");
  }
  std::unique_ptr<NormCore> core(new NormCore(kind, options));
  const Shape shape = {options.hidden_size};
  TE_FL_ASSIGN_OR_RETURN(core->weight_,
                         init::constant(shape, options.zero_centered_gamma ? 0.0f : 1.0f,
                                        options.param_dtype, options.device));
  if (kind == Normalization::kLayerNorm) {
    TE_FL_ASSIGN_OR_RETURN(core->bias_,
                           init::constant(shape, 0, options.param_dtype, options.device));
  }
  return core;
}

Status NormCore::forward(const Tensor& x, const Tensor& z, Saved& saved) const {
  TE_FL_RETURN_IF_ERROR(same_parameter(weight_.get()));
  TE_FL_RETURN_IF_ERROR(same_parameter(bias_.get()));
  const int64_t rows = x.size(0);
  saved.x = x;
  saved.version = weight_->version;
  TE_FL_ASSIGN_OR_RETURN(saved.rsigma, Tensor::empty({rows}, DType::kF32, options_.device));
  if (kind_ == Normalization::kRMSNorm) {
    te_fl_rmsnorm_fwd_args args{};
    args.x = x;
    args.gamma = weight_->value;
    args.z = z;
    args.rsigma = saved.rsigma;
    args.epsilon = options_.epsilon;
    args.zero_centered_gamma = options_.zero_centered_gamma;
    return ops::rmsnorm_fwd(args, call_options(options_.device));
  }
  TE_FL_ASSIGN_OR_RETURN(saved.mu, Tensor::empty({rows}, DType::kF32, options_.device));
  te_fl_layernorm_fwd_args args{};
  args.x = x;
  args.gamma = weight_->value;
  args.beta = bias_->value;
  args.z = z;
  args.mu = saved.mu;
  args.rsigma = saved.rsigma;
  args.epsilon = options_.epsilon;
  args.zero_centered_gamma = options_.zero_centered_gamma;
  return ops::layernorm_fwd(args, call_options(options_.device));
}

Status NormCore::check_unchanged(const Saved& saved) const {
  return detail::check_unchanged(*weight_, saved.version);
}

Status NormCore::run_backward(const Tensor& dz, const Saved& saved, const Tensor* residual,
                              const Tensor& dx, const Tensor& dgamma, const Tensor& dbeta) const {
  if (kind_ == Normalization::kLayerNorm) {
    te_fl_layernorm_bwd_args args{};
    args.dz = dz;
    args.x = saved.x;
    args.mu = saved.mu;
    args.rsigma = saved.rsigma;
    args.gamma = weight_->value;
    args.dx = dx;
    args.dgamma = dgamma;
    args.dbeta = dbeta;
    args.zero_centered_gamma = options_.zero_centered_gamma;
    if (residual != nullptr) args.add = *residual;
    return ops::layernorm_bwd(args, call_options(options_.device));
  }
  if (residual == nullptr) {
    te_fl_rmsnorm_bwd_args args{};
    args.dz = dz;
    args.x = saved.x;
    args.rsigma = saved.rsigma;
    args.gamma = weight_->value;
    args.dx = dx;
    args.dgamma = dgamma;
    args.zero_centered_gamma = options_.zero_centered_gamma;
    return ops::rmsnorm_bwd(args, call_options(options_.device));
  }
  te_fl_rmsnorm_bwd_add_args args{};
  args.dz = dz;
  args.x = saved.x;
  args.add = *residual;
  args.rsigma = saved.rsigma;
  args.gamma = weight_->value;
  args.dx = dx;
  args.dgamma = dgamma;
  args.zero_centered_gamma = options_.zero_centered_gamma;
  return ops::rmsnorm_bwd_add(args, call_options(options_.device));
}

Result<Tensor> NormCore::backward(const Tensor& dz, const Saved& saved,
                                  const Tensor* residual) const {
  TE_FL_RETURN_IF_ERROR(check_unchanged(saved));
  TE_FL_ASSIGN_OR_RETURN(Tensor dx, empty_like(dz, saved.x.dtype()));
  TE_FL_ASSIGN_OR_RETURN(GradTarget dgamma, GradTarget::open(weight_.get()));
  TE_FL_ASSIGN_OR_RETURN(GradTarget dbeta, GradTarget::open(bias_.get()));
  Tensor sums = dgamma.tensor();
  if (!sums.defined()) {  // frozen, but the ops always write it
    TE_FL_ASSIGN_OR_RETURN(sums, empty_like(weight_->value, DType::kF32));
  }
  TE_FL_RETURN_IF_ERROR(run_backward(dz, saved, residual, dx, sums, dbeta.tensor()));
  TE_FL_RETURN_IF_ERROR(dgamma.commit());
  TE_FL_RETURN_IF_ERROR(dbeta.commit());
  return dx;
}

Result<Tensor> normed_input(const NormCore& norm, GemmUnit& gemm, GemmUnit::Use& use,
                            const Tensor& x, NormCore::Saved& saved, Tensor* high_precision,
                            const TensorParallel& parallel) {
  if (high_precision == nullptr && !parallel.divides_sequence()) {
    TE_FL_ASSIGN_OR_RETURN(Tensor input, gemm.input_buffer(use, x.size(0)));
    TE_FL_RETURN_IF_ERROR(norm.forward(x, input, saved));
    return gemm.written_input(use, input);
  }
  TE_FL_ASSIGN_OR_RETURN(const Tensor z, empty_like(x, gemm.spec().activation_dtype));
  TE_FL_RETURN_IF_ERROR(norm.forward(x, z, saved));
  if (high_precision != nullptr) *high_precision = z;
  return gemm.prepare_input(use, z);
}

}  // namespace detail

namespace {

struct NormRecord : Ctx::Record {
  detail::NormCore::Saved saved;
  Shape shape;
  void visit_tensors(const Ctx::Visitor& visitor) { saved.visit_tensors(visitor); }
};

}  // namespace

Norm::Norm() = default;
Norm::~Norm() = default;

Status Norm::init(Normalization kind, const NormOptions& options) {
  TE_FL_ASSIGN_OR_RETURN(core_, detail::NormCore::create(kind, options));
  register_parameter("weight", core_->weight());
  if (core_->bias() != nullptr) register_parameter("bias", core_->bias());
  return {};
}

Result<Tensor> Norm::forward(const Tensor& x, Ctx* ctx) {
  TE_FL_ASSIGN_OR_RETURN(auto record, detail::new_record<NormRecord>(ctx, "Norm"));
  const NormOptions& options = core_->options();
  TE_FL_ASSIGN_OR_RETURN(Tensor flat, detail::as_matrix(x, options.hidden_size, "Norm: x"));
  TE_FL_ASSIGN_OR_RETURN(Tensor z, detail::empty_like(flat, options.activation_dtype));
  TE_FL_RETURN_IF_ERROR(core_->forward(flat, z, record->saved));
  record->shape.assign(x.shape().begin(), x.shape().end());
  if (ctx != nullptr) TE_FL_RETURN_IF_ERROR(ctx->store(this, std::move(record)));
  return z.view(x.shape());
}

Result<Tensor> Norm::backward(const Tensor& dy, Ctx& ctx, const Tensor* residual_grad) {
  TE_FL_ASSIGN_OR_RETURN(auto taken, ctx.take(this, "Norm"));
  auto& record = static_cast<NormRecord&>(*taken);
  const int64_t hidden = core_->options().hidden_size;
  TE_FL_RETURN_IF_ERROR(detail::check_gradient(dy, record.shape, hidden, "Norm"));
  TE_FL_ASSIGN_OR_RETURN(Tensor dz, detail::as_matrix(dy, hidden, "Norm: dy"));
  TE_FL_ASSIGN_OR_RETURN(
      const Tensor residual,
      detail::residual_matrix(residual_grad, record.shape, hidden, "Norm: residual_grad"));
  TE_FL_ASSIGN_OR_RETURN(
      Tensor dx, core_->backward(dz, record.saved, residual.defined() ? &residual : nullptr));
  return dx.view(record.shape);
}

Result<std::unique_ptr<LayerNorm>> LayerNorm::create(const NormOptions& options) {
  std::unique_ptr<LayerNorm> norm(new LayerNorm);
  TE_FL_RETURN_IF_ERROR(norm->init(Normalization::kLayerNorm, options));
  return norm;
}

Result<std::unique_ptr<RMSNorm>> RMSNorm::create(const NormOptions& options) {
  std::unique_ptr<RMSNorm> norm(new RMSNorm);
  TE_FL_RETURN_IF_ERROR(norm->init(Normalization::kRMSNorm, options));
  return norm;
}

}  // namespace te_fl::nn
