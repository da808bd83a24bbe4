#include "nn/autograd/gradients.hpp"

#include <algorithm>
#include <atomic>
#include <string>
#include <utility>

#include "nn/base/tensor_ops.hpp"
#include "te_fl/device.hpp"
#include "te_fl/nn/autograd/context.hpp"

namespace te_fl::nn {
namespace detail {
namespace {

constexpr uint64_t kForeign = UINT64_MAX;  // a capture that nn did not begin

std::atomic<uint64_t> g_captures{0};
thread_local StepCapture* t_capture = nullptr;

}  // namespace

Result<uint64_t> capture_of(const Device& device) {
  if (t_capture != nullptr) return t_capture->id();
  if (device.is_host()) return uint64_t{0};
  TE_FL_ASSIGN_OR_RETURN(const bool capturing,
                         devices::is_capturing(device, devices::current_stream(device)));
  return capturing ? kForeign : uint64_t{0};
}

namespace {

// Memory for the gradient, whose contents are nobody's yet.
Status allocate_grad(Parameter& parameter) {
  TE_FL_ASSIGN_OR_RETURN(const uint64_t captured, capture_of(parameter.value.device()));
  // A framework takes the gradient of what it lent when the backward ends, and captures its
  // backwards itself: it knows whose memory that is. Each launch writes it anew.
  const bool frameworks = captured == kForeign && parameter.owners_version.has_value();
  if (captured != 0 && !frameworks) {
    return failed_precondition(
        "backward: a graph is being captured, and the parameter " + parameter.value.describe() +
        " has no gradient yet, whose memory would be the graph's; run a step before the capture, "
        "or call the parameter's ensure_grad()");
  }
  TE_FL_ASSIGN_OR_RETURN(parameter.grad, empty_like(parameter.value, parameter.grad_dtype));
  parameter.grad_written = false;
  parameter.grad_stale = true;  // if what is to write it fails
  parameter.grad_cleared_in = captured;
  return {};
}

}  // namespace

void drop_grad(Parameter& parameter) noexcept {
  parameter.grad = Tensor();
  parameter.grad_written = parameter.grad_stale = parameter.grad_cleared = false;
}

Result<bool> adds(Parameter& parameter) {
  if (!parameter.grad.defined()) TE_FL_RETURN_IF_ERROR(allocate_grad(parameter));
  if (parameter.grad_written) return true;
  TE_FL_ASSIGN_OR_RETURN(const uint64_t now, capture_of(parameter.value.device()));
  return now != 0 && now != parameter.grad_cleared_in;
}

void wrote(Parameter& parameter) {
  if (t_capture != nullptr) t_capture->touch(parameter, true);
  parameter.grad_written = true;
  parameter.grad_stale = parameter.grad_cleared = false;
}

Result<bool> capturing(const Device& device) {
  if (device.is_host()) return false;
  TE_FL_ASSIGN_OR_RETURN(const uint64_t now, capture_of(device));
  return now != 0;
}

Result<bool> in_foreign_capture(const Device& device) {
  TE_FL_ASSIGN_OR_RETURN(const uint64_t now, capture_of(device));
  return now == kForeign;
}

void keep_for_graph(std::shared_ptr<const void> memory) {
  if (t_capture != nullptr) t_capture->keep(std::move(memory));
}

bool counted_in_capture(const Optimizer* optimizer) noexcept {
  return t_capture == nullptr || t_capture->optimizer() == optimizer;
}

StepCapture::StepCapture(const Optimizer* optimizer)
    : id_(++g_captures), optimizer_(optimizer), outer_(std::exchange(t_capture, this)) {}
StepCapture::~StepCapture() { (void)take(); }

std::vector<StepCapture::Touched> StepCapture::take() {
  if (t_capture == this) t_capture = outer_;
  for (Touched& t : touched_) {
    t.after = {t.parameter->grad_written, t.parameter->grad_stale};
    t.parameter->grad_written = t.before.written;
    t.parameter->grad_stale = t.before.stale;
  }
  return std::exchange(touched_, {});
}

void StepCapture::touch(Parameter& parameter, bool adds) {
  const auto same = [&](const Touched& t) { return t.parameter == &parameter; };
  if (std::any_of(touched_.begin(), touched_.end(), same)) return;
  touched_.push_back(
      {&parameter, parameter.grad, {parameter.grad_written, parameter.grad_stale}, {}, adds});
}

Status check_unchanged(const Parameter& parameter, uint64_t version) {
  if (parameter.version == version) return {};
  return failed_precondition(
      "backward: the parameter " + parameter.value.describe() +
      " has changed since the forward (an optimizer's step or load_state()), and the gradient of "
      "the input would be that of other weights; run each backward before the step");
}

Status prepare_launch(const std::vector<StepCapture::Touched>& touched) {
  for (const StepCapture::Touched& t : touched) {
    if (t.parameter->grad.raw_data() != t.grad.raw_data()) {
      return failed_precondition(
          "GraphedStep: the gradient of the parameter " + t.parameter->value.describe() +
          " was dropped or replaced after the capture, and the graph writes the one before; put "
          "that back, or capture the step anew");
    }
    if (!t.adds || !t.parameter->grad_stale) continue;
    TE_FL_RETURN_IF_ERROR(fill(t.parameter->grad, 0));
    t.parameter->grad_stale = false;
  }
  return {};
}

void launched(const std::vector<StepCapture::Touched>& touched) {
  for (const StepCapture::Touched& t : touched) {
    t.parameter->grad_written = t.after.written;
    t.parameter->grad_stale = t.after.stale;
    t.parameter->grad_cleared_in = 0;
  }
}

}  // namespace detail

Status Parameter::clear_grad() {
  if (!requires_grad) return {};
  TE_FL_ASSIGN_OR_RETURN(grad_cleared_in, detail::capture_of(value.device()));
  if (detail::t_capture != nullptr) detail::t_capture->touch(*this, false);
  grad_written = false;
  grad_stale = grad_cleared = true;
  return {};
}

void Parameter::set_requires_grad(bool wanted) {
  requires_grad = wanted;
  if (!wanted) detail::drop_grad(*this);
}

namespace {

// Codes that a linear map reads as they are.
Status check_codes(const Tensor& lent, const Tensor& value) {
  const bool served =
      lent.scaling() == Scaling::kTensor || lent.scaling() == Scaling::kBlock128x128;
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
  if (fp8_values != nullptr) {
    return failed_precondition("Parameter::borrow: the parameter " + value.describe() +
                               " holds FP8 codes alone, made under quantized_model_init; write() "
                               "values into it, or create its module outside of that scope");
  }
  TE_FL_RETURN_IF_ERROR(lent.quantized() ? check_codes(lent, value)
                                         : check_lent("Parameter::borrow", lent, value));
  // What te-fl writes counts in the low bits, what the owner writes above them: contents that come
  // back under their number have the version that they had.
  constexpr int kOwnWrites = 20;
  if (owners_version.has_value()) version += (version_of_owner - *owners_version) << kOwnWrites;
  version += !owners_version.has_value() || lent.dtype() != value.dtype();
  value = std::move(lent);
  owners_version = version_of_owner;
  return {};
}

Tensor Parameter::take_grad() {
  Tensor taken = grad_stale ? Tensor() : std::move(grad);
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
  grad_written = written;
  grad_stale = !written;
  grad_cleared = false;
  grad_cleared_in = 0;
  return {};
}

Status Parameter::ensure_grad() {
  if (!requires_grad || grad.defined()) return {};
  TE_FL_RETURN_IF_ERROR(detail::allocate_grad(*this));
  TE_FL_RETURN_IF_ERROR(detail::fill(grad, 0));
  grad_stale = false;
  return {};
}

}  // namespace te_fl::nn
