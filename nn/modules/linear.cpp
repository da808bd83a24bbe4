#include "te_fl/nn/modules/linear.hpp"

#include <algorithm>

#include "nn/autograd/ctx.hpp"
#include "nn/autograd/gradients.hpp"
#include "nn/base/tensor_ops.hpp"
#include "nn/modules/make_gemm.hpp"
#include "nn/modules/norm_core.hpp"
#include "nn/modules/split_parameters.hpp"
#include "nn/modules/tensor_parallel.hpp"

namespace te_fl::nn {
namespace {

struct LinearRecord : Ctx::Record {
  detail::GemmUnit::Use use;
  Shape shape;         // of x
  Shape output_shape;  // except the last extent, which is that of x
  void visit_tensors(const Ctx::Visitor& visitor) { use.visit_tensors(visitor); }
};

struct LayerNormLinearRecord : LinearRecord {
  detail::NormCore::Saved norm;
  void visit_tensors(const Ctx::Visitor& visitor) {
    use.visit_tensors(visitor);
    norm.visit_tensors(visitor);
  }
};

// GemmUnit::backward() for a unit whose parameters may be split into parts.
Result<Tensor> run_backward(detail::GemmUnit& gemm, detail::SplitParameters* split,
                            detail::GemmUnit::Use& use, const Tensor& dy,
                            const Tensor* into = nullptr) {
  if (split == nullptr) return gemm.backward(use, dy, into);
  TE_FL_RETURN_IF_ERROR(split->gather());
  TE_FL_RETURN_IF_ERROR(gemm.check_unchanged(use));
  TE_FL_RETURN_IF_ERROR(split->open_grad());
  TE_FL_ASSIGN_OR_RETURN(Tensor dx, gemm.backward(use, dy, into));
  TE_FL_RETURN_IF_ERROR(split->close_grad());
  return dx;
}

// The unit's parameters with their names. If `parts` is not empty, sets `split` and returns the
// parts.
Result<std::vector<NamedParameter>> list_parameters(
    const char* module, const detail::GemmUnit& gemm, const std::vector<ParameterPart>& parts,
    std::unique_ptr<detail::SplitParameters>& split) {
  std::vector<NamedParameter> named;
  if (parts.empty()) {
    named.push_back({"weight", gemm.weight()});
    if (gemm.bias() != nullptr) named.push_back({"bias", gemm.bias()});
    return named;
  }
  TE_FL_ASSIGN_OR_RETURN(split, detail::SplitParameters::create(module, gemm, parts));
  for (auto& part : split->named()) {
    named.push_back({std::move(part.name), std::move(part.parameter)});
  }
  return named;
}

// The unit's delayed weight gradients. For a split parameter, wraps each computation in open_grad()
// and close_grad().
std::shared_ptr<detail::DelayedWgrad> make_delayed(const detail::GemmUnit& gemm,
                                                   detail::SplitParameters* split) {
  if (split != nullptr) {
    gemm.delayed()->surround([split](const detail::DelayedWgrad::Run& run) -> Status {
      TE_FL_RETURN_IF_ERROR(split->open_grad());
      TE_FL_RETURN_IF_ERROR(run());
      return split->close_grad();
    });
  }
  return gemm.delayed();
}

Status check_divisible(const char* module, const char* field, int64_t value, int size) {
  if (value % size == 0) return {};
  return invalid_argument(std::string(module) + ": " + field + " is " + std::to_string(value) +
                          "; it must be a multiple of the number of tensor-parallel ranks, which "
                          "is " +
                          std::to_string(size));
}

Status check_whole(const char* module, const init::Shard& shard,
                   const std::vector<ParameterPart>& parts) {
  if (shard.whole.empty() && parts.empty()) return {};
  return invalid_argument(std::string(module) + ": " +
                          (parts.empty() ? "shard" : "parameters_split") +
                          " is given, and shard_of() divides whole maps; leave it out");
}

}  // namespace

Result<LinearOptions> shard_of(LinearOptions whole, ParallelMode mode,
                               const TensorParallel& parallel) {
  TE_FL_RETURN_IF_ERROR(check_whole("Linear", whole.shard, whole.parameters_split));
  whole.parallel_mode = mode;
  whole.parallel = parallel;
  if (!parallel.divides() || mode == ParallelMode::kNone) return whole;
  const bool column = mode == ParallelMode::kColumn;
  int64_t& features = column ? whole.out_features : whole.in_features;
  const char* field = column ? "out_features" : "in_features";
  TE_FL_RETURN_IF_ERROR(check_divisible("Linear", field, features, parallel.size()));
  const Shape extents = {whole.out_features, whole.in_features};
  features /= parallel.size();
  const int64_t begin = parallel.rank() * features;
  whole.shard = {extents, column ? Shape{begin, 0} : Shape{0, begin}};
  return whole;
}

Result<LayerNormLinearOptions> shard_of(LayerNormLinearOptions whole,
                                        const TensorParallel& parallel) {
  TE_FL_RETURN_IF_ERROR(check_whole("LayerNormLinear", whole.shard, whole.parameters_split));
  whole.parallel = parallel;
  if (!parallel.divides()) return whole;
  TE_FL_RETURN_IF_ERROR(
      check_divisible("LayerNormLinear", "out_features", whole.out_features, parallel.size()));
  const int64_t out = whole.out_features / parallel.size();
  whole.shard = {{whole.out_features, whole.in_features}, {parallel.rank() * out, 0}};
  whole.out_features = out;
  return whole;
}

Linear::Linear() = default;
Linear::~Linear() = default;

Result<std::unique_ptr<Linear>> Linear::create(const LinearOptions& options) {
  std::unique_ptr<Linear> linear(new Linear);
  const auto ranks = detail::make_sequence_ranks(options.parallel);
  const bool column = options.parallel_mode == ParallelMode::kColumn;
  const bool row = options.parallel_mode == ParallelMode::kRow;
  TE_FL_ASSIGN_OR_RETURN(linear->gemm_,
                         detail::make_gemm({.module = "Linear",
                                            .in = options.in_features,
                                            .out = options.out_features,
                                            .bias = options.bias,
                                            .param_dtype = options.param_dtype,
                                            .activation_dtype = options.activation_dtype,
                                            .device = options.device,
                                            .seed = options.seed,
                                            .init_std = options.init_std,
                                            .shard = options.shard,
                                            .high_precision = options.high_precision,
                                            .tied_weight = options.tied_weight,
                                            .return_bias = options.return_bias,
                                            .partial = options.parallel.divides() && row,
                                            .first = !row || options.parallel.rank() == 0,
                                            .input_rows = column ? ranks : nullptr,
                                            .gradient_rows = row ? ranks : nullptr}));
  if (options.parallel.divides()) {
    linear->parallel_ = options.parallel;
    linear->mode_ = options.parallel_mode;
  }
  detail::GemmUnit& gemm = *linear->gemm_;
  if (row) detail::mark_partial(options.parallel, gemm.bias().get());
  if (!options.parameters_split.empty() && options.tied_weight != nullptr) {
    return invalid_argument(
        "Linear: tied_weight and parameters_split are both given, and a shared weight is whole; "
        "leave one of them out");
  }
  TE_FL_ASSIGN_OR_RETURN(auto parameters,
                         list_parameters("Linear", gemm, options.parameters_split, linear->split_));
  for (NamedParameter& p : parameters) {
    linear->register_parameter(std::move(p.name), std::move(p.parameter));
  }
  linear->register_fp8("fp8", gemm.forward_state(), gemm.backward_state());
  linear->register_delayed(make_delayed(gemm, linear->split_.get()));
  return linear;
}

namespace {

// Views `into` as the matrix that a GEMM writes to; undefined if `into` is null.
Result<Tensor> result_matrix(const Tensor* into, std::span<const int64_t> like, int64_t last,
                             const char* what) {
  if (into == nullptr) return Tensor();
  const Shape shape = detail::with_last(like, last);
  if (!into->defined() || !into->contiguous() || !std::ranges::equal(into->shape(), shape)) {
    return invalid_argument(std::string(what) + " is " +
                            (into->defined() ? into->describe() : std::string("undefined")) +
                            "; it must be compact and of the result's shape");
  }
  return into->view({-1, last});
}
const Tensor* if_defined(const Tensor& t) { return t.defined() ? &t : nullptr; }

Status check_no_into(const char* what, const Tensor* into) {
  if (into == nullptr) return {};
  return invalid_argument(std::string(what) +
                          " has `into`, and its result is a sum over ranks, which is made in "
                          "memory of its own; leave it out");
}

}  // namespace

Result<Tensor> Linear::forward(const Tensor& x, Ctx* ctx, const ForwardOptions& options,
                               const Tensor* residual, const Tensor* into) {
  TE_FL_ASSIGN_OR_RETURN(auto record, detail::new_record<LinearRecord>(ctx, "Linear"));
  TE_FL_ASSIGN_OR_RETURN(Tensor flat, detail::as_operand(x, gemm_->spec().in, "Linear: x"));
  TE_FL_ASSIGN_OR_RETURN(const Shape shape,
                         detail::output_shape(parallel_, mode_, x.shape(), "Linear"));
  if (split_ != nullptr) TE_FL_RETURN_IF_ERROR(split_->gather());
  TE_FL_ASSIGN_OR_RETURN(record->use, gemm_->begin(ctx != nullptr));
  TE_FL_ASSIGN_OR_RETURN(Tensor input, gemm_->prepare_input(record->use, flat));
  TE_FL_ASSIGN_OR_RETURN(
      const Tensor added,
      detail::residual_matrix(residual, shape, gemm_->spec().out, "Linear: residual"));
  TE_FL_ASSIGN_OR_RETURN(const Tensor out,
                         result_matrix(into, shape, gemm_->spec().out, "Linear: into"));
  TE_FL_RETURN_IF_ERROR(detail::check_apart(out, input, "Linear: into", "x"));
  Tensor y;
  if (gemm_->spec().partial) {
    TE_FL_RETURN_IF_ERROR(check_no_into("Linear: forward", into));
    TE_FL_ASSIGN_OR_RETURN(y,
                           detail::forward_summed(*gemm_, parallel_, record->use, input, options));
    if (added.defined()) TE_FL_RETURN_IF_ERROR(detail::add(y, added, y));
  } else {
    TE_FL_ASSIGN_OR_RETURN(
        y, gemm_->forward(record->use, input, options, if_defined(added), if_defined(out)));
  }
  record->shape.assign(x.shape().begin(), x.shape().end());
  record->output_shape = shape;
  if (ctx != nullptr) TE_FL_RETURN_IF_ERROR(ctx->store(this, std::move(record)));
  return y.view(detail::with_last(shape, gemm_->spec().out));
}

Result<Tensor> Linear::backward(const Tensor& dy, Ctx& ctx, const Tensor* into) {
  TE_FL_ASSIGN_OR_RETURN(auto taken, ctx.take(this, "Linear"));
  auto& record = static_cast<LinearRecord&>(*taken);
  TE_FL_RETURN_IF_ERROR(
      detail::check_gradient(dy, record.output_shape, gemm_->spec().out, "Linear"));
  TE_FL_ASSIGN_OR_RETURN(Tensor flat, detail::as_operand(dy, gemm_->spec().out, "Linear: dy"));
  TE_FL_ASSIGN_OR_RETURN(const Tensor out,
                         result_matrix(into, record.shape, gemm_->spec().in, "Linear: into"));
  if (mode_ == ParallelMode::kColumn) {
    TE_FL_RETURN_IF_ERROR(check_no_into("Linear: backward", into));
  }
  TE_FL_RETURN_IF_ERROR(gemm_->check_result(record.use, flat, out, "Linear: into"));
  record.use.dgrad = ctx.input_grad || into != nullptr;
  TE_FL_ASSIGN_OR_RETURN(Tensor dx,
                         run_backward(*gemm_, split_.get(), record.use, flat, if_defined(out)));
  if (!record.use.dgrad) return dx;
  if (mode_ == ParallelMode::kColumn && !parallel_.divides_sequence()) {
    TE_FL_ASSIGN_OR_RETURN(dx, detail::summed(parallel_, dx));
  }
  return dx.view(record.shape);
}

LayerNormLinear::LayerNormLinear() = default;
LayerNormLinear::~LayerNormLinear() = default;

Result<std::unique_ptr<LayerNormLinear>> LayerNormLinear::create(
    const LayerNormLinearOptions& options) {
  std::unique_ptr<LayerNormLinear> module(new LayerNormLinear);
  TE_FL_ASSIGN_OR_RETURN(
      module->norm_, detail::NormCore::create(options.normalization,
                                              {.hidden_size = options.in_features,
                                               .epsilon = options.epsilon,
                                               .zero_centered_gamma = options.zero_centered_gamma,
                                               .param_dtype = options.param_dtype,
                                               .activation_dtype = options.activation_dtype,
                                               .device = options.device}));
  TE_FL_ASSIGN_OR_RETURN(
      module->gemm_,
      detail::make_gemm({.module = "LayerNormLinear",
                         .in = options.in_features,
                         .out = options.out_features,
                         .bias = options.bias,
                         .param_dtype = options.param_dtype,
                         .activation_dtype = options.activation_dtype,
                         .device = options.device,
                         .seed = options.seed,
                         .init_std = options.init_std,
                         .shard = options.shard,
                         .return_bias = options.return_bias,
                         .input_rows = detail::make_sequence_ranks(options.parallel)}));
  if (options.parallel.divides()) module->parallel_ = options.parallel;
  detail::mark_partial(options.parallel, module->norm_->weight().get());
  detail::mark_partial(options.parallel, module->norm_->bias().get());
  detail::GemmUnit& gemm = *module->gemm_;
  module->register_parameter("layer_norm_weight", module->norm_->weight());
  if (module->norm_->bias() != nullptr) {
    module->register_parameter("layer_norm_bias", module->norm_->bias());
  }
  TE_FL_ASSIGN_OR_RETURN(
      auto parameters,
      list_parameters("LayerNormLinear", gemm, options.parameters_split, module->split_));
  for (NamedParameter& p : parameters) {
    module->register_parameter(std::move(p.name), std::move(p.parameter));
  }
  module->register_fp8("fp8", gemm.forward_state(), gemm.backward_state());
  module->register_delayed(make_delayed(gemm, module->split_.get()));
  return module;
}

Result<Tensor> LayerNormLinear::forward(const Tensor& x, Ctx* ctx, const ForwardOptions& options,
                                        const Tensor* into, Tensor* layernorm_output) {
  TE_FL_ASSIGN_OR_RETURN(auto record,
                         detail::new_record<LayerNormLinearRecord>(ctx, "LayerNormLinear"));
  TE_FL_ASSIGN_OR_RETURN(Tensor flat, detail::as_matrix(x, gemm_->spec().in, "LayerNormLinear: x"));
  TE_FL_ASSIGN_OR_RETURN(const Shape shape, detail::output_shape(parallel_, ParallelMode::kColumn,
                                                                 x.shape(), "LayerNormLinear"));
  if (split_ != nullptr) TE_FL_RETURN_IF_ERROR(split_->gather());
  TE_FL_ASSIGN_OR_RETURN(record->use, gemm_->begin(ctx != nullptr));
  TE_FL_ASSIGN_OR_RETURN(Tensor input,
                         detail::normed_input(*norm_, *gemm_, record->use, flat, record->norm,
                                              layernorm_output, parallel_));
  if (layernorm_output != nullptr) {
    TE_FL_ASSIGN_OR_RETURN(*layernorm_output, layernorm_output->view(x.shape()));
  }
  TE_FL_ASSIGN_OR_RETURN(const Tensor out,
                         result_matrix(into, shape, gemm_->spec().out, "LayerNormLinear: into"));
  if (ctx != nullptr) {
    TE_FL_RETURN_IF_ERROR(detail::check_apart(out, record->norm.x, "LayerNormLinear: into", "x"));
  }
  TE_FL_ASSIGN_OR_RETURN(Tensor y,
                         gemm_->forward(record->use, input, options, nullptr, if_defined(out)));
  record->shape.assign(x.shape().begin(), x.shape().end());
  record->output_shape = shape;
  if (ctx != nullptr) TE_FL_RETURN_IF_ERROR(ctx->store(this, std::move(record)));
  return y.view(detail::with_last(shape, gemm_->spec().out));
}

Result<Tensor> LayerNormLinear::backward(const Tensor& dy, Ctx& ctx, const Tensor* residual_grad,
                                         const Tensor* layernorm_output_grad) {
  TE_FL_ASSIGN_OR_RETURN(auto taken, ctx.take(this, "LayerNormLinear"));
  auto& record = static_cast<LayerNormLinearRecord&>(*taken);
  TE_FL_RETURN_IF_ERROR(
      detail::check_gradient(dy, record.output_shape, gemm_->spec().out, "LayerNormLinear"));
  TE_FL_RETURN_IF_ERROR(norm_->check_unchanged(record.norm));
  TE_FL_ASSIGN_OR_RETURN(Tensor flat,
                         detail::as_operand(dy, gemm_->spec().out, "LayerNormLinear: dy"));
  TE_FL_ASSIGN_OR_RETURN(const Tensor residual,
                         detail::residual_matrix(residual_grad, record.shape, gemm_->spec().in,
                                                 "LayerNormLinear: residual_grad"));
  TE_FL_ASSIGN_OR_RETURN(
      const Tensor past,
      detail::residual_matrix(layernorm_output_grad, record.shape, gemm_->spec().in,
                              "LayerNormLinear: layernorm_output_grad"));
  record.use.dgrad = ctx.input_grad || norm_->trains();
  TE_FL_ASSIGN_OR_RETURN(Tensor dz, run_backward(*gemm_, split_.get(), record.use, flat));
  if (!record.use.dgrad) return dz;
  if (!parallel_.divides_sequence()) {
    TE_FL_ASSIGN_OR_RETURN(dz, detail::summed(parallel_, dz));
  }
  if (past.defined()) TE_FL_RETURN_IF_ERROR(detail::add(dz, past, dz));
  TE_FL_ASSIGN_OR_RETURN(Tensor dx, norm_->backward(dz, record.norm, if_defined(residual)));
  return dx.view(record.shape);
}

}  // namespace te_fl::nn
