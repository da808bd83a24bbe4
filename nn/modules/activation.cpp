#include "nn/modules/activation.hpp"

#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "nn/autograd/ctx.hpp"
#include "nn/base/tensor_ops.hpp"
#include "te_fl/environment.hpp"

namespace te_fl::nn {
namespace detail {
namespace {

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

}  // namespace

const ActivationOps& activation_ops(Activation activation) {
  return kActivations.at(static_cast<size_t>(activation));
}

Status activate(const ActivationOptions& options, const Tensor& pre, const Tensor& out) {
  const OpId id = activation_ops(options.activation).forward;
  OpManager& manager = OpManager::instance();
  if (options.activation == Activation::kClampedSwiglu) {
    te_fl_clamped_swiglu_args args{};
    args.input = pre;
    args.output = out;
    args.limit = options.clamp_limit;
    args.alpha = options.clamp_alpha;
    args.glu_linear_offset = options.glu_linear_offset;
    return manager.call(id, &args, call_options(out.device()));
  }
  if (is_gated(options.activation)) {
    te_fl_activation_glu_fwd_args args{};
    args.input = pre;
    args.output = out;
    return manager.call(id, &args, call_options(out.device()));
  }
  te_fl_activation_act_fwd_args args{};
  args.input = pre;
  args.output = out;
  return manager.call(id, &args, call_options(out.device()));
}

Status activate_backward(const ActivationOptions& options, const Tensor& grad, const Tensor& pre,
                         const Tensor& out) {
  const OpId id = activation_ops(options.activation).backward;
  OpManager& manager = OpManager::instance();
  if (options.activation == Activation::kClampedSwiglu) {
    te_fl_clamped_dswiglu_args args{};
    args.grad = grad;
    args.input = pre;
    args.output = out;
    args.limit = options.clamp_limit;
    args.alpha = options.clamp_alpha;
    args.glu_linear_offset = options.glu_linear_offset;
    return manager.call(id, &args, call_options(out.device()));
  }
  if (is_gated(options.activation)) {
    te_fl_activation_glu_bwd_args args{};
    args.grad = grad;
    args.input = pre;
    args.output = out;
    return manager.call(id, &args, call_options(out.device()));
  }
  te_fl_activation_act_bwd_args args{};
  args.grad = grad;
  args.input = pre;
  args.output = out;
  return manager.call(id, &args, call_options(out.device()));
}

}  // namespace detail

using detail::activation_ops;

bool is_gated(Activation activation) noexcept { return activation_ops(activation).gated; }
std::string_view name(Activation activation) noexcept { return activation_ops(activation).name; }

Result<Activation> parse_activation(std::string_view text) {
  std::vector<std::string> names;
  for (size_t i = 0; i < detail::kActivations.size(); ++i) {
    if (detail::kActivations[i].name == text) return static_cast<Activation>(i);
    names.emplace_back(detail::kActivations[i].name);
  }
  std::string message = "\"" + std::string(text) + "\" is no activation; ";
  std::string near = environment::nearest(std::string(text), names);
  if (!near.empty()) message += "did you mean " + near + "? ";
  message += "Activations:";
  for (const std::string& n : names) message += " " + n;
  return invalid_argument(std::move(message));
}

namespace {

struct ActivationRecord : Ctx::Record {
  Tensor x;
};

}  // namespace

Result<std::unique_ptr<ActivationLayer>> ActivationLayer::create(const ActivationOptions& options) {
  if (options.activation > Activation::kClampedSwiglu) {
    return invalid_argument("ActivationLayer: activation is " +
                            std::to_string(static_cast<int>(options.activation)) +
                            "; it must be one of nn::Activation");
  }
  return std::unique_ptr<ActivationLayer>(new ActivationLayer(options));
}

Result<Tensor> ActivationLayer::forward(const Tensor& x, Ctx* ctx) {
  TE_FL_ASSIGN_OR_RETURN(auto record, detail::new_record<ActivationRecord>(ctx, "ActivationLayer"));
  const int64_t width = x.defined() && x.rank() > 0 ? x.size(-1) : 0;
  const bool gated = is_gated(options_.activation);
  if (width == 0 || (gated && width % 2 != 0)) {
    return invalid_argument(
        "ActivationLayer: x is " + (x.defined() ? x.describe() : std::string("undefined")) +
        "; its last dimension must be at least 1" +
        (gated ? ", and even, as " + std::string(name(options_.activation)) + " is gated"
               : std::string()));
  }
  TE_FL_ASSIGN_OR_RETURN(record->x, detail::as_matrix(x, width, "ActivationLayer: x"));
  const int64_t out = gated ? width / 2 : width;
  TE_FL_ASSIGN_OR_RETURN(const Tensor y,
                         Tensor::empty({record->x.size(0), out}, x.dtype(), x.device()));
  TE_FL_RETURN_IF_ERROR(detail::activate(options_, record->x, y));
  if (ctx != nullptr) {
    TE_FL_ASSIGN_OR_RETURN(record->x, record->x.view(x.shape()));
    TE_FL_RETURN_IF_ERROR(ctx->store(this, std::move(record)));
  }
  return y.view(detail::with_last(x.shape(), out));
}

Result<Tensor> ActivationLayer::backward(const Tensor& dy, Ctx& ctx) {
  TE_FL_ASSIGN_OR_RETURN(auto taken, ctx.take(this, "ActivationLayer"));
  const Tensor x = static_cast<ActivationRecord&>(*taken).x;
  const int64_t width = x.size(-1), out = is_gated(options_.activation) ? width / 2 : width;
  TE_FL_RETURN_IF_ERROR(detail::check_gradient(dy, x.shape(), out, "ActivationLayer"));
  TE_FL_ASSIGN_OR_RETURN(const Tensor grad, detail::as_matrix(dy, out, "ActivationLayer: dy"));
  TE_FL_ASSIGN_OR_RETURN(const Tensor pre, x.view({-1, width}));
  TE_FL_ASSIGN_OR_RETURN(const Tensor dx, detail::empty_like(pre, pre.dtype()));
  TE_FL_RETURN_IF_ERROR(detail::activate_backward(options_, grad, pre, dx));
  return dx.view(x.shape());
}

}  // namespace te_fl::nn
