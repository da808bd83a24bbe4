#include "te_fl/nn/modules/moe_layer.hpp"

#include <array>
#include <cmath>
#include <optional>
#include <string>
#include <utility>

#include "nn/autograd/ctx.hpp"
#include "nn/autograd/gradients.hpp"
#include "nn/base/tensor_ops.hpp"
#include "nn/fp8/autocast.hpp"
#include "nn/modules/activation.hpp"
#include "nn/modules/grouped_gemm.hpp"
#include "nn/modules/make_gemm.hpp"
#include "nn/modules/moe_router.hpp"
#include "nn/modules/moe_rows.hpp"
#include "nn/modules/row_factors.hpp"
#include "nn/modules/scaled_activation.hpp"
#include "te_fl/nn/modules/expert_parallel.hpp"
#include "te_fl/nn/modules/init.hpp"
#include "te_fl/nn/modules/mlp.hpp"

namespace te_fl::nn {
namespace {

constexpr const char* kLayer = "MoELayer";

// The tensors that the backward of the shared experts reads.
struct SharedRecord {
  Ctx mlp;
  // Only with a gate: the MLP's output, and the gate's probabilities and indices.
  Tensor output, gate, gate_intermediate, gate_indices, identity;
  void visit_tensors(const Ctx::Visitor& visitor) {
    mlp.visit(visitor);
    for (Tensor* t : {&output, &gate, &gate_intermediate, &gate_indices, &identity}) visitor(*t);
  }
};

struct MoERecord : Ctx::Record {
  detail::MoERouter::Saved router;
  detail::Dispatched dispatched;
  std::optional<ExpertRoute> route;  // only if the experts are divided over ranks
  std::vector<int64_t> splits;       // of the rows that this rank's experts computed
  std::vector<detail::GemmUnit::Use> fc1, fc2;
  Tensor x;               // [T, hidden]
  Tensor pre;             // output of fc1, [R, ffn or 2 ffn]
  Tensor row_probs;       // F32 [R]; only if the activation applies the probabilities
  Tensor probs, fc2_out;  // only if the sum over experts applies them
  Tensor loss_grad;
  SharedRecord shared;
  Shape shape;  // of the module's x
  void visit_tensors(const Ctx::Visitor& visitor) {
    router.visit_tensors(visitor);
    dispatched.visit_tensors(visitor);
    for (auto& use : fc1) use.visit_tensors(visitor);
    for (auto& use : fc2) use.visit_tensors(visitor);
    for (Tensor* t : {&x, &pre, &row_probs, &probs, &fc2_out}) visitor(*t);
    shared.visit_tensors(visitor);
  }
};

Status refuse(const std::string& why) { return invalid_argument(std::string(kLayer) + ": " + why); }

Status check_groups(const MoELayerOptions& o) {
  if (o.num_groups == 0 && o.group_topk == 0) return {};
  const std::string seen = "num_groups is " + std::to_string(o.num_groups) + " and group_topk " +
                           std::to_string(o.group_topk);
  if (o.num_groups < 1 || o.group_topk < 1 || o.group_topk > o.num_groups) {
    return refuse(seen + "; group_topk is 1 to num_groups, or both are 0 for no groups");
  }
  if (o.num_experts % o.num_groups != 0) {
    return refuse(seen + "; num_groups must divide num_experts, which is " +
                  std::to_string(o.num_experts));
  }
  if (o.top_k > o.group_topk * (o.num_experts / o.num_groups)) {
    return refuse(seen + "; the chosen groups have " +
                  std::to_string(o.group_topk * (o.num_experts / o.num_groups)) +
                  " experts, fewer than top_k = " + std::to_string(o.top_k));
  }
  return {};
}

// The part of the experts that this rank has.
struct Share {
  explicit Share(const MoELayerOptions& o) {
    if (o.framework_expert_ranks != nullptr) {
      ranks = o.framework_expert_ranks->size(), rank = o.framework_expert_ranks->rank();
    } else if (o.expert_ranks != nullptr) {
      ranks = o.expert_ranks->size(), rank = o.expert_ranks->rank();
    }
  }
  int64_t ranks = 1, rank = 0;
};

Status check_options(const MoELayerOptions& o) {
  for (const auto& [field, value] :
       {std::pair("hidden_size", o.hidden_size), std::pair("ffn_hidden_size", o.ffn_hidden_size),
        std::pair("num_experts", o.num_experts)}) {
    TE_FL_RETURN_IF_ERROR(detail::check_size(kLayer, field, value));
  }
  if (o.num_experts % Share(o).ranks != 0) {
    return refuse("num_experts is " + std::to_string(o.num_experts) +
                  "; the number of expert_ranks, " + std::to_string(Share(o).ranks) +
                  ", must divide it");
  }
  if (o.top_k < 1 || o.top_k > o.num_experts) {
    return refuse("top_k is " + std::to_string(o.top_k) + "; it is 1 to num_experts, which is " +
                  std::to_string(o.num_experts));
  }
  if (o.activation > Activation::kClampedSwiglu ||
      o.score_function > ScoreFunction::kSqrtSoftplus) {
    return refuse(
        "activation and score_function must be one of nn::Activation and "
        "nn::ScoreFunction");
  }
  TE_FL_RETURN_IF_ERROR(check_groups(o));
  const bool softmax = o.score_function == ScoreFunction::kSoftmax;
  if (o.use_pre_softmax && !softmax) {
    return refuse("use_pre_softmax is set with the score function " +
                  std::string(name(o.score_function)) + "; it belongs to softmax, leave it out");
  }
  if (o.expert_bias && softmax) {
    return refuse(
        "expert_bias is set with the score function softmax; use sigmoid or "
        "sqrtsoftplus, or leave it out");
  }
  for (const auto& [field, value] :
       {std::pair("aux_loss_coeff", o.aux_loss_coeff), std::pair("z_loss_coeff", o.z_loss_coeff)}) {
    if (value >= 0 && std::isfinite(value)) continue;
    return refuse(std::string(field) + " is " + std::to_string(value) +
                  "; it is a finite number, 0 (no loss) or more");
  }
  if (!std::isfinite(o.scaling_factor)) {
    return refuse("scaling_factor is " + std::to_string(o.scaling_factor) +
                  "; it is a finite number");
  }
  if (o.shared_ffn_hidden_size < 0 || (o.shared_ffn_hidden_size == 0 && o.shared_expert_gate)) {
    return refuse("shared_ffn_hidden_size is " + std::to_string(o.shared_ffn_hidden_size) +
                  (o.shared_expert_gate ? " with shared_expert_gate; the gate needs shared experts"
                                        : "; it is 0 (no shared experts) or more"));
  }
  return {};
}

Result<std::unique_ptr<detail::GroupedGemm>> make_experts(const MoELayerOptions& o, bool second) {
  const uint64_t seed = init::subseed(o.seed, second ? 2 : 1);
  std::vector<std::unique_ptr<detail::GemmUnit>> units;
  const Share share(o);
  const int64_t count = o.num_experts / share.ranks, first = share.rank * count;
  for (int64_t i = first; i < first + count; ++i) {
    TE_FL_ASSIGN_OR_RETURN(
        auto unit,
        detail::make_gemm(
            {.module = kLayer,
             .in = second ? o.ffn_hidden_size : o.hidden_size,
             .out = second ? o.hidden_size : o.ffn_hidden_size * (is_gated(o.activation) ? 2 : 1),
             .bias = o.bias,
             .param_dtype = o.param_dtype,
             .activation_dtype = o.activation_dtype,
             .device = o.device,
             .seed = init::subseed(seed, static_cast<uint64_t>(i)),
             .init_std = second ? o.output_init_std : o.init_std}));
    units.push_back(std::move(unit));
  }
  auto group = std::make_unique<detail::GroupedGemm>(std::move(units));
  if (o.single_grouped_weight) {
    TE_FL_RETURN_IF_ERROR(group->group_weights(kLayer));
    TE_FL_RETURN_IF_ERROR(group->group_biases(kLayer));
  }
  return group;
}

Result<Tensor> upload(std::span<const int64_t> values, DType dtype, const Device& device) {
  const std::array<int64_t, 1> shape = {static_cast<int64_t>(values.size())};
  TE_FL_ASSIGN_OR_RETURN(Tensor made, Tensor::empty(shape, dtype));
  for (size_t i = 0; i < values.size(); ++i) {
    if (dtype == DType::kI64) {
      made.data<int64_t>()[i] = values[i];
    } else {
      made.data<float>()[i] = static_cast<float>(values[i]);
    }
  }
  return device.is_host() ? Result<Tensor>(std::move(made)) : made.to(device);
}

Status check_auxiliary(const Tensor& tensor, DType dtype, int64_t size, const char* what) {
  if (!tensor.defined() || (tensor.dtype() == dtype && tensor.rank() == 1 &&
                            tensor.size(0) == size && tensor.contiguous())) {
    return {};
  }
  return refuse(std::string(what) + " is " + tensor.describe() + "; it is compact, " +
                std::string(name(dtype)) + "[" + std::to_string(size) + "]");
}

}  // namespace

struct MoELayer::Impl {
  MoELayerOptions options;
  std::unique_ptr<detail::MoERouter> router;
  std::unique_ptr<detail::GroupedGemm> fc1, fc2;
  std::unique_ptr<LayerNormMLP> shared;      // null without shared experts
  std::unique_ptr<detail::Fp32Linear> gate;  // of the shared experts; null without

  ActivationOptions activation() const {
    return {options.activation, options.clamp_limit, options.clamp_alpha,
            options.glu_linear_offset};
  }
  // True if the activation applies the probabilities; false if the sum over experts does.
  bool scales_activation() const { return !options.bias && detail::has_scaled(options.activation); }
  Status make_shared_experts();
  // The activation of record.pre, with the probabilities if scales_activation().
  Result<Tensor> activated(const MoERecord& record) const;
  // The gradients of fc1's output and of the rows' probabilities (undefined if the sum over experts
  // applies them), from the gradient of the activation's output.
  Result<Tensor> activated_backward(const MoERecord& record, const Tensor& grad,
                                    Tensor& d_row_probs) const;
  // Computes the auxiliary losses and the numbers of tokens.
  Status auxiliary(const Tensor& logits, std::span<const int64_t> counts, MoERecord& record,
                   MoEAuxiliary* wanted) const;
  // Runs fc1, the activation and fc2 on the experts' rows.
  Result<Tensor> experts(const detail::ExpertRows& rows, MoERecord& record,
                         const ForwardOptions& forward, bool training);
  // Adds the output of the shared experts to y.
  Status add_shared(const Tensor& x, const Tensor& y, SharedRecord& record,
                    const ForwardOptions& forward, bool training);
  // The gradient of x by way of the shared experts, plus `past`.
  Result<Tensor> shared_backward(const Tensor& dy, const Tensor& x, SharedRecord& record,
                                 const Tensor& past);
};

Status MoELayer::Impl::make_shared_experts() {
  const MoELayerOptions& o = options;
  TE_FL_ASSIGN_OR_RETURN(shared, LayerNormMLP::create({.hidden_size = o.hidden_size,
                                                       .ffn_hidden_size = o.shared_ffn_hidden_size,
                                                       .activation = o.activation,
                                                       .clamp_limit = o.clamp_limit,
                                                       .clamp_alpha = o.clamp_alpha,
                                                       .bias = o.bias,
                                                       .param_dtype = o.param_dtype,
                                                       .activation_dtype = o.activation_dtype,
                                                       .device = o.device,
                                                       .seed = init::subseed(o.seed, 3),
                                                       .init_std = o.init_std,
                                                       .output_init_std = o.output_init_std,
                                                       .glu_linear_offset = o.glu_linear_offset,
                                                       .normalizes = false}));
  if (!o.shared_expert_gate) return {};
  const std::array<int64_t, 2> shape = {1, o.hidden_size};
  TE_FL_ASSIGN_OR_RETURN(auto weight, init::normal(shape, o.init_std, init::subseed(o.seed, 4),
                                                   o.param_dtype, o.device));
  gate = std::make_unique<detail::Fp32Linear>(std::move(weight));
  return {};
}

MoELayer::MoELayer() : impl_(std::make_unique<Impl>()) {}
MoELayer::~MoELayer() = default;

Result<std::unique_ptr<MoELayer>> MoELayer::create(const MoELayerOptions& options) {
  TE_FL_RETURN_IF_ERROR(check_options(options));
  std::unique_ptr<MoELayer> layer(new MoELayer);
  Impl& impl = *layer->impl_;
  impl.options = options;
  const std::array<int64_t, 2> shape = {options.num_experts, options.hidden_size};
  TE_FL_ASSIGN_OR_RETURN(auto weight,
                         init::normal(shape, options.init_std, init::subseed(options.seed, 0),
                                      options.param_dtype, options.device));
  std::shared_ptr<Parameter> bias;
  if (options.expert_bias) {
    const std::array<int64_t, 1> experts = {options.num_experts};
    TE_FL_ASSIGN_OR_RETURN(bias, init::constant(experts, 0, DType::kF32, options.device));
    bias->requires_grad = false;
  }
  impl.router = std::make_unique<detail::MoERouter>(options, std::move(weight), std::move(bias));
  TE_FL_ASSIGN_OR_RETURN(impl.fc1, make_experts(options, false));
  TE_FL_ASSIGN_OR_RETURN(impl.fc2, make_experts(options, true));
  if (options.shared_ffn_hidden_size != 0) TE_FL_RETURN_IF_ERROR(impl.make_shared_experts());

  layer->register_parameter("router_weight", impl.router->weight());
  if (impl.router->expert_bias() != nullptr) {
    layer->register_parameter("expert_bias", impl.router->expert_bias());
  }
  for (const auto& [prefix, group] : {std::pair(std::string("fc1_"), impl.fc1.get()),
                                      std::pair(std::string("fc2_"), impl.fc2.get())}) {
    const auto& units = group->units();
    if (group->weight() != nullptr) {
      layer->register_parameter(prefix + "weight", group->weight()->whole());
    }
    for (size_t i = 0; i < units.size(); ++i) {
      const std::string number = std::to_string(i);
      if (group->weight() == nullptr) {
        layer->register_parameter(prefix + "weight" + number, units[i]->weight());
      }
      layer->register_fp8(prefix + "gemm" + number, units[i]->forward_state(),
                          units[i]->backward_state());
    }
    if (group->bias() != nullptr) {
      layer->register_parameter(prefix + "bias", group->bias()->whole());
    }
    for (size_t i = 0; i < units.size() && options.bias && group->bias() == nullptr; ++i) {
      layer->register_parameter(prefix + "bias" + std::to_string(i), units[i]->bias());
    }
    layer->register_delayed(group->delayed());
  }
  if (impl.gate != nullptr) layer->register_parameter("shared_gate_weight", impl.gate->weight());
  if (impl.shared != nullptr) layer->register_module("shared_experts", *impl.shared);
  return layer;
}

Result<Tensor> MoELayer::Impl::activated(const MoERecord& record) const {
  TE_FL_ASSIGN_OR_RETURN(Tensor out, Tensor::empty({record.pre.size(0), options.ffn_hidden_size},
                                                   record.pre.dtype(), record.pre.device()));
  TE_FL_RETURN_IF_ERROR(
      scales_activation() ? detail::activate_scaled(activation(), record.pre, record.row_probs, out)
                          : detail::activate(activation(), record.pre, out));
  return out;
}

Result<Tensor> MoELayer::Impl::activated_backward(const MoERecord& record, const Tensor& grad,
                                                  Tensor& d_row_probs) const {
  TE_FL_ASSIGN_OR_RETURN(Tensor out, detail::empty_like(record.pre, record.pre.dtype()));
  if (!scales_activation()) {
    TE_FL_RETURN_IF_ERROR(detail::activate_backward(activation(), grad, record.pre, out));
    return out;
  }
  TE_FL_ASSIGN_OR_RETURN(d_row_probs, detail::empty_like(record.row_probs, DType::kF32));
  TE_FL_RETURN_IF_ERROR(detail::activate_scaled_backward(activation(), grad, record.pre,
                                                         record.row_probs, out, d_row_probs));
  return out;
}

Status MoELayer::Impl::auxiliary(const Tensor& logits, std::span<const int64_t> counts,
                                 MoERecord& record, MoEAuxiliary* wanted) const {
  const Device& device = options.device;
  if (wanted != nullptr) {
    TE_FL_ASSIGN_OR_RETURN(const Tensor tokens, upload(counts, DType::kI64, device));
    if (wanted->tokens_per_expert.defined()) {
      TE_FL_RETURN_IF_ERROR(detail::copy(tokens, wanted->tokens_per_expert));
    } else {
      wanted->tokens_per_expert = tokens;
    }
  }
  if (!router->has_losses()) return {};
  TE_FL_ASSIGN_OR_RETURN(const Tensor tokens, upload(counts, DType::kF32, device));
  Tensor loss = wanted != nullptr ? wanted->aux_loss : Tensor();
  if (!loss.defined()) {
    TE_FL_ASSIGN_OR_RETURN(loss, Tensor::empty({1}, DType::kF32, device));
  }
  TE_FL_RETURN_IF_ERROR(router->losses(logits, tokens, record.router, loss));
  if (wanted != nullptr) {
    wanted->aux_loss = loss;
    record.loss_grad = wanted->aux_loss_grad;
  }
  return {};
}

Result<Tensor> MoELayer::Impl::experts(const detail::ExpertRows& rows, MoERecord& record,
                                       const ForwardOptions& forward, bool training) {
  TE_FL_ASSIGN_OR_RETURN(record.pre, fc1->forward(record.fc1, rows.rows, rows.splits, forward,
                                                  training, Tensor(), Tensor()));
  TE_FL_ASSIGN_OR_RETURN(const Tensor middle, activated(record));
  // Over ranks the rows are kept, since their tokens are on other ranks.
  if (!record.route.has_value()) detail::GroupedGemm::drop_inputs(record.fc1);
  TE_FL_ASSIGN_OR_RETURN(Tensor out, fc2->forward(record.fc2, middle, rows.splits, forward,
                                                  training, Tensor(), Tensor()));
  detail::GroupedGemm::drop_inputs(record.fc2);
  return out;
}

Status MoELayer::Impl::add_shared(const Tensor& x, const Tensor& y, SharedRecord& record,
                                  const ForwardOptions& forward, bool training) {
  TE_FL_ASSIGN_OR_RETURN(const Tensor out,
                         shared->forward(x, training ? &record.mlp : nullptr, forward));
  if (gate == nullptr) return detail::add(y, out, y);
  // The gate is a router with one expert, whose probability is the sigmoid of its logit.
  TE_FL_ASSIGN_OR_RETURN(const Tensor logits, gate->forward(x));
  TE_FL_ASSIGN_OR_RETURN(record.gate, detail::empty_like(logits, DType::kF32));
  TE_FL_ASSIGN_OR_RETURN(record.gate_intermediate, detail::empty_like(logits, DType::kF32));
  TE_FL_ASSIGN_OR_RETURN(record.gate_indices, detail::empty_like(logits, DType::kI32));
  te_fl_fused_topk_with_score_function_fwd_args args{};
  args.logits = logits;
  args.probs = record.gate;
  args.topk_indices = record.gate_indices;
  args.intermediate_output = record.gate_intermediate;
  args.topk = 1;
  args.score_function = TE_FL_SCORE_FUNCTION_SIGMOID;
  TE_FL_RETURN_IF_ERROR(
      ops::fused_topk_with_score_function_fwd(args, detail::call_options(x.device())));
  TE_FL_ASSIGN_OR_RETURN(record.identity, detail::identity_rows(x.size(0), x.device()));
  TE_FL_ASSIGN_OR_RETURN(const Tensor gated, detail::empty_like(out, out.dtype()));
  TE_FL_RETURN_IF_ERROR(detail::scale_rows(out, record.identity, record.gate, gated));
  record.output = out;
  return detail::add(y, gated, y);
}

Result<Tensor> MoELayer::forward(const Tensor& x, Ctx* ctx, const ForwardOptions& options,
                                 MoEAuxiliary* auxiliary) {
  TE_FL_ASSIGN_OR_RETURN(auto record, detail::new_record<MoERecord>(ctx, kLayer));
  Impl& impl = *impl_;
  const MoELayerOptions& o = impl.options;
  TE_FL_ASSIGN_OR_RETURN(record->x, detail::as_matrix(x, o.hidden_size, "MoELayer: x"));
  if (auxiliary != nullptr) {
    TE_FL_RETURN_IF_ERROR(check_auxiliary(auxiliary->aux_loss, DType::kF32, 1, "aux_loss"));
    TE_FL_RETURN_IF_ERROR(
        check_auxiliary(auxiliary->aux_loss_grad, DType::kF32, 1, "aux_loss_grad"));
    TE_FL_RETURN_IF_ERROR(check_auxiliary(auxiliary->tokens_per_expert, DType::kI64, o.num_experts,
                                          "tokens_per_expert"));
  }
  TE_FL_ASSIGN_OR_RETURN(const detail::Fp8Mode mode, detail::current_mode());
  Tensor logits;
  TE_FL_ASSIGN_OR_RETURN(detail::Routing routing,
                         impl.router->choose(record->x, record->router, logits));
  TE_FL_ASSIGN_OR_RETURN(const std::vector<int64_t> counts,
                         detail::count_tokens(routing, o.num_experts));
  TE_FL_RETURN_IF_ERROR(impl.auxiliary(logits, counts, *record, auxiliary));
  logits = Tensor();

  TE_FL_ASSIGN_OR_RETURN(const Tensor tokens, detail::cast(record->x, o.activation_dtype));
  TE_FL_ASSIGN_OR_RETURN(
      detail::ExpertRows rows,
      detail::dispatch(tokens, routing, counts, detail::row_alignment(mode), record->dispatched));
  if (o.expert_ranks != nullptr || o.framework_expert_ranks != nullptr) {
    const bool framework = o.framework_expert_ranks != nullptr;
    TE_FL_ASSIGN_OR_RETURN(
        record->route, framework
                           ? ExpertRoute::create(o.framework_expert_ranks, rows.splits, rows.rows)
                           : ExpertRoute::create(o.expert_ranks, rows.splits, rows.rows));
    TE_FL_ASSIGN_OR_RETURN(RowsWithProbs moved, record->route->dispatch(rows.rows, rows.probs));
    rows = {std::move(moved.rows), std::move(moved.probs), record->route->splits()};
  }
  record->splits = rows.splits;
  Tensor probs;
  if (impl.scales_activation()) {
    record->row_probs = rows.probs;
  } else {
    record->probs = probs = routing.probs;
  }
  const bool training = ctx != nullptr;
  TE_FL_ASSIGN_OR_RETURN(Tensor out, impl.experts(rows, *record, options, training));
  if (record->route.has_value()) {
    TE_FL_ASSIGN_OR_RETURN(RowsWithProbs back, record->route->combine(out));
    out = std::move(back.rows);
  }
  TE_FL_ASSIGN_OR_RETURN(Tensor y, detail::combine(out, record->dispatched, probs));
  if (probs.defined()) record->fc2_out = out;
  if (impl.shared != nullptr) {
    TE_FL_RETURN_IF_ERROR(impl.add_shared(record->x, y, record->shared, options, training));
  }
  record->shape.assign(x.shape().begin(), x.shape().end());
  if (training) TE_FL_RETURN_IF_ERROR(ctx->store(this, std::move(record)));
  return y.view(x.shape());
}

Result<Tensor> MoELayer::Impl::shared_backward(const Tensor& dy, const Tensor& x,
                                               SharedRecord& record, const Tensor& past) {
  Tensor grad = dy, dx = past;
  if (gate != nullptr) {
    TE_FL_ASSIGN_OR_RETURN(grad, detail::empty_like(record.output, record.output.dtype()));
    TE_FL_ASSIGN_OR_RETURN(const Tensor d_gate, detail::empty_like(record.gate, DType::kF32));
    TE_FL_RETURN_IF_ERROR(
        detail::scale_rows_backward(dy, record.output, record.identity, record.gate, grad, d_gate));
    TE_FL_ASSIGN_OR_RETURN(const Tensor d_logits, detail::empty_like(record.gate, DType::kF32));
    te_fl_fused_topk_with_score_function_bwd_args args{};
    args.topk_indices = record.gate_indices;
    args.intermediate_output = record.gate_intermediate;
    args.grad_probs = d_gate;
    args.grad_logits = d_logits;
    args.topk = 1;
    args.score_function = TE_FL_SCORE_FUNCTION_SIGMOID;
    TE_FL_RETURN_IF_ERROR(
        ops::fused_topk_with_score_function_bwd(args, detail::call_options(dy.device())));
    TE_FL_ASSIGN_OR_RETURN(dx, gate->backward(d_logits, x, past));
  }
  return shared->backward(grad, record.mlp, &dx);
}

Result<Tensor> MoELayer::backward(const Tensor& dy, Ctx& ctx) {
  TE_FL_ASSIGN_OR_RETURN(auto taken, ctx.take(this, kLayer));
  auto& record = static_cast<MoERecord&>(*taken);
  Impl& impl = *impl_;
  const int64_t hidden = impl.options.hidden_size;
  const DType dtype = impl.options.activation_dtype;
  TE_FL_RETURN_IF_ERROR(detail::check_gradient(dy, record.shape, hidden, kLayer));
  TE_FL_RETURN_IF_ERROR(detail::check_unchanged(*impl.router->weight(), record.router.version));
  TE_FL_ASSIGN_OR_RETURN(const Tensor flat, detail::as_matrix(dy, hidden, "MoELayer: dy"));
  TE_FL_ASSIGN_OR_RETURN(const Tensor grad, detail::cast(flat, dtype));
  const auto& splits = record.splits;

  Tensor d_probs;
  TE_FL_ASSIGN_OR_RETURN(
      Tensor d_rows,
      detail::combine_backward(grad, record.dispatched, record.fc2_out, record.probs, &d_probs));
  record.fc2_out = Tensor();
  if (record.route.has_value()) {
    TE_FL_ASSIGN_OR_RETURN(RowsWithProbs moved, record.route->dispatch(d_rows));
    d_rows = std::move(moved.rows);
  }
  TE_FL_RETURN_IF_ERROR(
      impl.fc2->give_inputs(record.fc2, splits, [&] { return impl.activated(record); }));
  TE_FL_ASSIGN_OR_RETURN(const Tensor d_activated,
                         impl.fc2->backward(record.fc2, d_rows, splits, true, Tensor()));
  record.fc2.clear();
  d_rows = Tensor();
  Tensor d_row_probs;
  TE_FL_ASSIGN_OR_RETURN(Tensor d_pre, impl.activated_backward(record, d_activated, d_row_probs));
  record.pre = Tensor();
  TE_FL_RETURN_IF_ERROR(impl.fc1->give_inputs(record.fc1, splits, [&]() -> Result<Tensor> {
    TE_FL_ASSIGN_OR_RETURN(const Tensor tokens, detail::cast(record.x, dtype));
    return detail::dispatch_again(tokens, record.dispatched);
  }));
  TE_FL_ASSIGN_OR_RETURN(d_rows, impl.fc1->backward(record.fc1, d_pre, splits, true, Tensor()));
  record.fc1.clear();
  d_pre = Tensor();
  if (record.route.has_value()) {
    TE_FL_ASSIGN_OR_RETURN(RowsWithProbs back, record.route->combine(d_rows, d_row_probs));
    d_rows = std::move(back.rows);
    d_row_probs = std::move(back.probs);
  }
  if (d_row_probs.defined()) {
    TE_FL_ASSIGN_OR_RETURN(d_probs, detail::probs_backward(d_row_probs, record.dispatched));
  }
  TE_FL_ASSIGN_OR_RETURN(Tensor dx, detail::dispatch_backward(d_rows, record.dispatched));
  d_rows = Tensor();
  if (impl.shared != nullptr) {
    TE_FL_ASSIGN_OR_RETURN(dx, impl.shared_backward(grad, record.x, record.shared, dx));
  }
  TE_FL_ASSIGN_OR_RETURN(
      dx, impl.router->backward(d_probs, record.router, record.x, record.loss_grad, dx));
  return dx.view(record.shape);
}

Status MoELayer::update_expert_bias(const Tensor& tokens_per_expert, float rate) {
  const auto& bias = impl_->router->expert_bias();
  const int64_t experts = impl_->options.num_experts;
  if (bias == nullptr) {
    return failed_precondition(
        "MoELayer: update_expert_bias() was called on a layer without expert_bias; create it with "
        "expert_bias = true");
  }
  if (!tokens_per_expert.defined()) return refuse("tokens_per_expert is undefined");
  TE_FL_RETURN_IF_ERROR(
      check_auxiliary(tokens_per_expert, DType::kI64, experts, "tokens_per_expert"));
  TE_FL_ASSIGN_OR_RETURN(const Tensor tokens, tokens_per_expert.to(Device()));
  TE_FL_ASSIGN_OR_RETURN(const Tensor values, bias->value.to(Device()));
  double mean = 0;
  for (int64_t e = 0; e < experts; ++e) mean += static_cast<double>(tokens.data<int64_t>()[e]);
  mean /= static_cast<double>(experts);
  for (int64_t e = 0; e < experts; ++e) {
    const double missing = mean - static_cast<double>(tokens.data<int64_t>()[e]);
    if (missing != 0) values.data<float>()[e] += missing > 0 ? rate : -rate;
  }
  return bias->write(values);
}

}  // namespace te_fl::nn
