#include "nn/autograd/parameter.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include "nn/autograd/step_capture.hpp"
#include "nn/base/capture.hpp"
#include "nn/base/tensor_ops.hpp"

namespace te_fl::nn {
namespace detail {
namespace {

// Allocates the gradient, uninitialised.
Status allocate_grad(Parameter& parameter) {
  TE_FL_ASSIGN_OR_RETURN(const uint64_t captured, find_capture(parameter.value.device()));
  // Allocating a gradient in a graph's memory is allowed only for a borrowed parameter in a capture
  // that its framework began: the framework takes the gradient when the backward pass ends, and
  // knows that each launch overwrites it.
  const bool frameworks =
      captured == kForeignCapture && parameter.internals().owners_version.has_value();
  if (captured != 0 && !frameworks) {
    return failed_precondition(
        "backward: a graph is being captured, and the parameter " + parameter.value.describe() +
        " has no gradient yet, whose memory would be the graph's; run a step before the capture, "
        "or call the parameter's ensure_grad()");
  }
  TE_FL_ASSIGN_OR_RETURN(parameter.grad, empty_like(parameter.value, parameter.grad_dtype));
  ParameterState& state = parameter.internals();
  state.grad_written = false;
  state.grad_stale = true;  // in case its first write fails
  state.grad_cleared_in = captured;
  return {};
}

}  // namespace

void drop_grad(Parameter& parameter) noexcept {
  parameter.grad = Tensor();
  ParameterState& state = parameter.internals();
  state.grad_written = state.grad_stale = state.grad_cleared = false;
}

Result<bool> adds(Parameter& parameter) {
  if (!parameter.grad.defined()) TE_FL_RETURN_IF_ERROR(allocate_grad(parameter));
  if (parameter.internals().grad_written) return true;
  TE_FL_ASSIGN_OR_RETURN(const uint64_t now, find_capture(parameter.value.device()));
  return now != 0 && now != parameter.internals().grad_cleared_in;
}

void wrote(Parameter& parameter) {
  ParameterState& state = parameter.internals();
  touch(&parameter, state, parameter.grad, true);
  state.grad_written = true;
  state.grad_stale = state.grad_cleared = false;
  if (state.listener != nullptr) state.listener->wrote(state.listeners_number);
}

Status check_complete(std::string_view who, const NamedParameter& p) {
  if (!p.parameter->requires_grad || *p.parameter->internals().delayed_wgrads == 0) return {};
  return failed_precondition(std::string(who) + ": backwards have left the gradient of " + p.name +
                             " to backward_dw(), which was not called since; call it on the "
                             "module first");
}

Status check_writable(std::string_view who, std::string_view name, const Parameter& parameter) {
  if (!parameter.value.quantized() || parameter.internals().fp8_values != nullptr) return {};
  return failed_precondition(
      std::string(who) + ": the parameter " + std::string(name) + (name.empty() ? "" : " ") +
      parameter.value.describe() +
      " holds codes that were lent (Parameter::borrow()); their owner writes "
      "them, or lends values in high precision");
}

}  // namespace detail

Parameter::Parameter() : state_(std::make_unique<detail::ParameterState>()) {}
Parameter::~Parameter() = default;

Status Parameter::clear_grad() {
  if (!requires_grad) return {};
  TE_FL_ASSIGN_OR_RETURN(state_->grad_cleared_in, detail::find_capture(value.device()));
  detail::touch(this, *state_, grad, false);
  state_->grad_written = false;
  state_->grad_stale = state_->grad_cleared = true;
  if (state_->listener != nullptr) state_->listener->cleared();
  return {};
}

void Parameter::set_requires_grad(bool wanted) {
  requires_grad = wanted;
  if (!wanted) detail::drop_grad(*this);
}

namespace {

// Checks that a linear map can read the lent FP8 data directly.
Status check_codes(const Tensor& lent, const Tensor& value) {
  const bool served = lent.scaling() == Scaling::kTensor ||
                      lent.scaling() == Scaling::kBlock128x128 || lent.scaling() == Scaling::kMXFP8;
  if (served && lent.dtype() == DType::kF8E4M3 && lent.has_rowwise() && lent.rank() == 2 &&
      lent.device() == value.device() && std::ranges::equal(lent.shape(), value.shape())) {
    return {};
  }
  return invalid_argument("Parameter::borrow: the tensor is " + lent.describe() +
                          "; for the parameter " + value.describe() +
                          " codes must be E4M3 [rows, columns], row-wise, scaled by tensor or by "
                          "blocks of 128x128, of that shape and device");
}

Status check_lent(const char* call, const Tensor& lent, const Tensor& value) {
  if (lent.defined() && !lent.quantized() && is_high(lent.dtype()) && lent.contiguous() &&
      lent.device() == value.device() && std::ranges::equal(lent.shape(), value.shape())) {
    return {};
  }
  return invalid_argument(std::string(call) + ": the tensor is " + lent.describe() +
                          "; for the parameter " + value.describe() +
                          " it must be compact, F32, BF16 or F16, of that shape and device");
}

}  // namespace

Status Parameter::borrow(Tensor lent, uint64_t version_of_owner) {
  if (state_->fp8_values != nullptr) {
    return failed_precondition("Parameter::borrow: the parameter " + value.describe() +
                               " holds FP8 codes alone, made under quantized_model_init; write() "
                               "values into it, or create its module outside of that scope");
  }
  TE_FL_RETURN_IF_ERROR(lent.quantized() ? check_codes(lent, value)
                                         : check_lent("Parameter::borrow", lent, value));
  // The version counts te-fl's own writes in its low bits and contains the owner's version in the
  // bits above. If the owner lends earlier contents again with their version number, the parameter
  // has its earlier version again.
  constexpr int kOwnWrites = 20;
  if (state_->owners_version.has_value())
    version += (version_of_owner - *state_->owners_version) << kOwnWrites;
  version += !state_->owners_version.has_value() || lent.dtype() != value.dtype();
  value = std::move(lent);
  state_->owners_version = version_of_owner;
  return {};
}

Tensor Parameter::take_grad() {
  Tensor taken = state_->grad_stale ? Tensor() : std::move(grad);
  detail::drop_grad(*this);
  return taken;
}

Status Parameter::give_grad(Tensor gradient, bool written) {
  TE_FL_RETURN_IF_ERROR(check_lent("Parameter::give_grad", gradient, value));
  if (!requires_grad) {
    return failed_precondition("Parameter::give_grad: the parameter " + value.describe() +
                               " is frozen; call set_requires_grad(true) first");
  }
  grad_dtype = gradient.dtype();
  grad = std::move(gradient);
  state_->grad_written = written;
  state_->grad_stale = !written;
  state_->grad_cleared = false;
  state_->grad_cleared_in = 0;
  return {};
}

Status Parameter::ensure_grad() {
  if (!requires_grad || grad.defined()) return {};
  TE_FL_RETURN_IF_ERROR(detail::allocate_grad(*this));
  TE_FL_RETURN_IF_ERROR(detail::fill(grad, 0));
  state_->grad_stale = false;
  return {};
}

Status Parameter::write(const Tensor& values) {
  if (!values.defined() || values.quantized() || !is_high(values.dtype()) ||
      !std::ranges::equal(values.shape(), value.shape())) {
    return invalid_argument("Parameter::write: the values are " +
                            (values.defined() ? values.describe() : std::string("undefined")) +
                            "; for the parameter " + value.describe() +
                            " they must be F32, BF16 or F16 of its shape");
  }
  TE_FL_RETURN_IF_ERROR(detail::check_writable("Parameter::write", "", *this));
  TE_FL_ASSIGN_OR_RETURN(Tensor there, values.device() == value.device()
                                           ? detail::compact(values)
                                           : values.to(value.device()));
  TE_FL_RETURN_IF_ERROR(state_->fp8_values != nullptr ? state_->fp8_values->write(there, value)
                                                      : detail::copy(there, value));
  ++version;
  return {};
}

Result<Tensor> Parameter::read(DType dtype) const {
  if (!is_high(dtype)) {
    return invalid_argument("Parameter::read: the dtype is " + std::string(name(dtype)) +
                            "; it must be f32, bf16 or f16");
  }
  TE_FL_ASSIGN_OR_RETURN(Tensor values, detail::empty_like(value, dtype));
  TE_FL_RETURN_IF_ERROR(detail::copy_values(value, values));
  return values;
}

}  // namespace te_fl::nn
