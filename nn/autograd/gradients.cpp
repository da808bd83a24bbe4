#include "nn/autograd/gradients.hpp"

#include <string>

#include "nn/autograd/parameter.hpp"
#include "nn/autograd/step_capture.hpp"
#include "nn/base/tensor_ops.hpp"

namespace te_fl::nn::detail {

Result<GradTarget> GradTarget::open(Parameter* parameter) {
  GradTarget target;
  if (parameter == nullptr || !parameter->requires_grad) return target;
  target.parameter_ = parameter;
  TE_FL_ASSIGN_OR_RETURN(target.scratch_, adds(*parameter));
  if (target.scratch_) {
    TE_FL_ASSIGN_OR_RETURN(target.tensor_, empty_like(parameter->grad, parameter->grad.dtype()));
  } else {
    target.tensor_ = parameter->grad;
  }
  return target;
}

Status GradTarget::commit() {
  if (parameter_ == nullptr) return {};
  if (scratch_) TE_FL_RETURN_IF_ERROR(add(parameter_->grad, tensor_, parameter_->grad));
  wrote(*parameter_);
  return {};
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
    if (!t.adds || !t.state->grad_stale) continue;
    TE_FL_RETURN_IF_ERROR(fill(t.parameter->grad, 0));
    t.state->grad_stale = false;
  }
  return {};
}

void launched(const std::vector<StepCapture::Touched>& touched) {
  for (const StepCapture::Touched& t : touched) {
    t.state->grad_written = t.after.written;
    t.state->grad_stale = t.after.stale;
    t.state->grad_cleared_in = 0;
  }
}

}  // namespace te_fl::nn::detail
