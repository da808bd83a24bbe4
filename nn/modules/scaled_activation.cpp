#include "nn/modules/scaled_activation.hpp"

#include "nn/base/tensor_ops.hpp"

namespace te_fl::nn::detail {
namespace {

template <class Args>
void set_clamp(Args& args, const ActivationOptions& options) {
  args.limit = options.clamp_limit;
  args.alpha = options.clamp_alpha;
  args.glu_linear_offset = options.glu_linear_offset;
}

template <class Args>
Args forward_args(const Tensor& pre, const Tensor& factors, const Tensor& out) {
  Args args{};
  args.input = pre;
  args.act_scales = factors;
  args.output = out;
  return args;
}

template <class Args>
Args backward_args(const Tensor& grad, const Tensor& pre, const Tensor& factors, const Tensor& out,
                   const Tensor& d_factors) {
  Args args = forward_args<Args>(pre, factors, out);
  args.grad = grad;
  args.grad_scales = d_factors;
  return args;
}

}  // namespace

bool has_scaled(Activation activation) noexcept {
  return activation == Activation::kSwiglu || activation == Activation::kClampedSwiglu ||
         activation == Activation::kSRelu;
}

Status activate_scaled(const ActivationOptions& options, const Tensor& pre, const Tensor& factors,
                       const Tensor& out) {
  const CallOptions call = call_options(out.device());
  if (options.activation == Activation::kSwiglu) {
    return ops::scaled_swiglu(forward_args<te_fl_scaled_swiglu_args>(pre, factors, out), call);
  }
  if (options.activation == Activation::kSRelu) {
    return ops::scaled_srelu(forward_args<te_fl_scaled_srelu_args>(pre, factors, out), call);
  }
  auto args = forward_args<te_fl_scaled_clamped_swiglu_args>(pre, factors, out);
  set_clamp(args, options);
  return ops::scaled_clamped_swiglu(args, call);
}

Status activate_scaled_backward(const ActivationOptions& options, const Tensor& grad,
                                const Tensor& pre, const Tensor& factors, const Tensor& out,
                                const Tensor& d_factors) {
  const CallOptions call = call_options(out.device());
  if (options.activation == Activation::kSwiglu) {
    return ops::scaled_dswiglu(
        backward_args<te_fl_scaled_dswiglu_args>(grad, pre, factors, out, d_factors), call);
  }
  if (options.activation == Activation::kSRelu) {
    return ops::scaled_dsrelu(
        backward_args<te_fl_scaled_dsrelu_args>(grad, pre, factors, out, d_factors), call);
  }
  auto args = backward_args<te_fl_scaled_clamped_dswiglu_args>(grad, pre, factors, out, d_factors);
  set_clamp(args, options);
  return ops::scaled_clamped_dswiglu(args, call);
}

}  // namespace te_fl::nn::detail
