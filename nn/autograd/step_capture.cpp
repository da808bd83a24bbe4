#include "nn/autograd/step_capture.hpp"

#include <algorithm>
#include <utility>

namespace te_fl::nn::detail {
namespace {

thread_local StepCapture* t_step = nullptr;

}  // namespace

StepCapture::StepCapture(const void* counter)
    : counter_(counter), outer_(std::exchange(t_step, this)) {}
StepCapture::~StepCapture() { (void)take(); }

std::vector<StepCapture::Touched> StepCapture::take() {
  if (t_step == this) t_step = outer_;
  capture_.end();
  for (Touched& t : touched_) {
    t.after = {t.state->grad_written, t.state->grad_stale};
    t.state->grad_written = t.before.written;
    t.state->grad_stale = t.before.stale;
  }
  return std::exchange(touched_, {});
}

void touch(Parameter* parameter, ParameterState& state, const Tensor& grad, bool adds) {
  if (t_step == nullptr) return;
  const auto same = [&](const StepCapture::Touched& t) { return t.parameter == parameter; };
  if (std::any_of(t_step->touched_.begin(), t_step->touched_.end(), same)) return;
  t_step->touched_.push_back(
      {parameter, &state, grad, {state.grad_written, state.grad_stale}, {}, adds});
}

bool counted_in_capture(const void* optimizer) noexcept {
  return t_step == nullptr || t_step->counter() == optimizer;
}

}  // namespace te_fl::nn::detail
