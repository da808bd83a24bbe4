#include "te_fl/nn/optim/optimizer.hpp"

#include <atomic>
#include <cmath>
#include <cstring>
#include <utility>

#include "core/base/fork.hpp"
#include "nn/autograd/parameter.hpp"
#include "nn/autograd/step_capture.hpp"
#include "nn/base/capture.hpp"
#include "nn/base/tensor_ops.hpp"
#include "nn/optim/optimizer_gradients.hpp"
#include "te_fl/log.hpp"
#include "te_fl/nn/optim/loss_scaler.hpp"
#include "te_fl/watch.hpp"

namespace te_fl::nn {

Result<float> clip_grad_norm(const std::vector<NamedParameter>& parameters, float max_norm,
                             const Comm* ranks) {
  if (!(max_norm > 0)) {
    return invalid_argument("clip_grad_norm: max_norm is " + std::to_string(max_norm) +
                            "; it must be greater than 0");
  }
  return detail::clip("clip_grad_norm", {parameters, {}, ranks, nullptr}, max_norm);
}

Optimizer::Optimizer(std::vector<NamedParameter> parameters, float lr, float max_grad_norm)
    : parameters_(std::move(parameters)), lr_(lr), max_grad_norm_(max_grad_norm) {
  for (const NamedParameter& p : parameters_) stateless_.push_back(!p.parameter->requires_grad);
  set_steps(0);
}
Optimizer::~Optimizer() = default;

void Optimizer::set_steps(int64_t steps) noexcept {
  steps_ = steps;
  versions_.resize(parameters_.size());
  for (size_t i = 0; i < versions_.size(); ++i) versions_[i] = parameters_[i].parameter->version;
}

Status Optimizer::check_slots() const {
  for (size_t i = 0; i < stateless_.size(); ++i) {
    if (!stateless_[i] || !detail::trained(*parameters_[i].parameter)) continue;
    return failed_precondition(
        "Optimizer::step: the parameter " + parameters_[i].name +
        " has a gradient but was frozen when the optimizer was created, which made no state for "
        "it; create the optimizer after unfreezing, or freeze the parameter again");
  }
  return {};
}

Status Optimizer::refresh_masters() {
  for (size_t i = 0; i < versions_.size(); ++i) {
    const uint64_t version = parameters_[i].parameter->version;
    if (versions_[i] == version) continue;
    TE_FL_RETURN_IF_ERROR(refresh_master(i));
    versions_[i] = version;
  }
  return {};
}

Device Optimizer::home() const {
  return parameters_.empty() ? Device() : parameters_.front().value().device();
}

const Tensor& Optimizer::grad_norm() const noexcept {
  static constinit std::atomic<const Tensor*> none{nullptr};
  return device_ != nullptr ? device_->grad_norm : core::made_once(none, [] { return new Tensor; });
}

Status Optimizer::divide(const char* optimizer, std::shared_ptr<detail::GradientBuckets> zero) {
  if (zero == nullptr) return {};
  if (!zero->zero()) {
    return invalid_argument(std::string(optimizer) +
                            ": zero is a DataParallel that does not divide the gradients; create "
                            "it with DataParallelOptions::zero");
  }
  for (const NamedParameter& p : parameters_) {
    const detail::OwnPart* const part =
        p.parameter->requires_grad ? zero->own_part(*p.parameter) : nullptr;
    if (part == nullptr && p.parameter->requires_grad) {
      return invalid_argument(std::string(optimizer) + ": the parameter " + p.name +
                              " is not among those of the DataParallel in zero; create that with "
                              "the same parameters");
    }
    parts_.push_back(part);
  }
  zero_ = std::move(zero);
  return {};
}

detail::Gradients Optimizer::gradients() const {
  return {parameters_, parts_, norm_ranks_.get(), zero_.get()};
}

std::vector<StatePart> Optimizer::state_parts() const {
  std::vector<StatePart> result;
  for (size_t i = 0; i < parts_.size(); ++i) {
    if (parts_[i] == nullptr) continue;
    const std::span<const int64_t> shape = parameters_[i].value().shape();
    result.push_back(
        {parameters_[i].name, Shape(shape.begin(), shape.end()), parts_[i]->begin, parts_[i]->end});
  }
  return result;
}

int Optimizer::state_rank() const noexcept { return zero_ == nullptr ? 0 : zero_->ranks().rank(); }
int Optimizer::state_ranks() const noexcept { return zero_ == nullptr ? 1 : zero_->ranks().size(); }

Status Optimizer::make_capturable() {
  auto state = std::make_unique<OnDevice>();
  // One memory block, so that one copy writes the step and the learning rates.
  const auto rates = static_cast<int64_t>(lr_scales_.size());
  TE_FL_ASSIGN_OR_RETURN(Tensor block, Tensor::zeros({1 + (rates + 1) / 2}, DType::kI64, home()));
  TE_FL_ASSIGN_OR_RETURN(state->step, block.slice(0, 0, 1));
  auto owner = std::make_shared<Tensor>(block);
  const int64_t one[] = {1};
  for (int64_t i = 0; i < rates; ++i) {
    void* const at = reinterpret_cast<float*>(block.data<int64_t>() + 1) + i;
    TE_FL_ASSIGN_OR_RETURN(Tensor lr, Tensor::wrap(at, one, {}, DType::kF32, home(), owner));
    state->lr.push_back(std::move(lr));
  }
  // Allocated before any capture, since memory allocated in a capture belongs to the graph.
  TE_FL_ASSIGN_OR_RETURN(flag_, Tensor::zeros({1}, DType::kI32, home()));
  if (max_grad_norm_ > 0) {
    TE_FL_ASSIGN_OR_RETURN(state->grad_norm, Tensor::zeros({1}, DType::kF32, home()));
  }
  device_ = std::move(state);
  return {};
}

Status Optimizer::write_state() {
  std::vector<std::byte> state(sizeof steps_ + lr_scales_.size() * sizeof(float));
  std::memcpy(state.data(), &steps_, sizeof steps_);
  for (size_t i = 0; i < lr_scales_.size(); ++i) {
    const float lr = group_lr(i);
    std::memcpy(state.data() + sizeof steps_ + i * sizeof lr, &lr, sizeof lr);
  }
  return devices::copy(home(), device_->step.raw_data(), Device(), state.data(), state.size(),
                       devices::current_stream(home()));
}

Status Optimizer::set_groups(const char* optimizer, const std::vector<ParamGroup>& groups) {
  for (size_t i = 0; i < groups.size(); ++i) {
    const std::string who = std::string(optimizer) + ": groups[" + std::to_string(i) + "]";
    if (groups[i].selects == nullptr) {
      return invalid_argument(who + " selects nothing: its function is null");
    }
    TE_FL_RETURN_IF_ERROR(detail::check_non_negative(who.c_str(), "lr_scale", groups[i].lr_scale));
    TE_FL_RETURN_IF_ERROR(detail::check_non_negative(who.c_str(), "weight_decay",
                                                     groups[i].weight_decay.value_or(0)));
    lr_scales_.push_back(groups[i].lr_scale);
  }
  return {};
}

Status Optimizer::set_lr_scale(size_t group, float scale) {
  if (group + 1 >= lr_scales_.size()) {
    return invalid_argument("Optimizer::set_lr_scale: the group is " + std::to_string(group) +
                            "; the optimizer was created with " +
                            std::to_string(lr_scales_.size() - 1));
  }
  TE_FL_RETURN_IF_ERROR(detail::check_non_negative("Optimizer::set_lr_scale", "scale", scale));
  lr_scales_[group + 1] = scale;
  return {};
}

Status Optimizer::advance() {
  if (device_ == nullptr) {
    return failed_precondition(
        "Optimizer::advance: the optimizer was created without capturable = true, so no graph can "
        "have captured its step");
  }
  TE_FL_RETURN_IF_ERROR(refresh_masters());
  ++steps_;
  if (Status status = write_state(); !status) {
    --steps_;
    return status;
  }
  // Updates all parameters, since others may have been frozen at the capture.
  for (const NamedParameter& p : parameters_) ++p.parameter->version;
  set_steps(steps_);
  return {};
}

// Clips by the norm on the device; sets `noop` if the norm is not finite.
Status Optimizer::clip_on_device(const Tensor& noop) {
  TE_FL_RETURN_IF_ERROR(detail::norm_into(gradients(), device_->grad_norm));
  return detail::scale_by_norm(gradients(), device_->grad_norm, max_grad_norm_, noop, home());
}

// Divides the gradients by the loss scale s >= 1. Implemented as clipping to norm 1 of gradients
// whose norm is given as s. The op reads s on the device when it runs.
Status Optimizer::unscale(LossScaler& scaler) {
  if (scaler.scale().device() != home()) {
    return invalid_argument("Optimizer::step: the scaler is on " +
                            to_string(scaler.scale().device()) + ", the parameters on " +
                            to_string(home()) + "; create it there (LossScalerOptions::device)");
  }
  if (!flag_.defined()) {
    TE_FL_ASSIGN_OR_RETURN(flag_, Tensor::empty({1}, DType::kI32, home()));
  }
  noop_ = flag_;
  TE_FL_RETURN_IF_ERROR(detail::fill(noop_, 0));
  scaler.watch(noop_);
  TE_FL_RETURN_IF_ERROR(detail::scale_by_norm(gradients(), scaler.scale(), 1, noop_, home()));
  return detail::agree_on(gradients(), noop_);
}

// Clips if max_grad_norm is set: on the device if the optimizer is capturable, otherwise on the
// host.
Status Optimizer::clip(const LossScaler* scaler) {
  if (max_grad_norm_ <= 0 || parameters_.empty()) return {};
  if (device_ != nullptr) {
    if (scaler != nullptr) return clip_on_device(noop_);
    noop_ = flag_;
    TE_FL_RETURN_IF_ERROR(detail::fill(noop_, 0));
    return clip_on_device(noop_);
  }
  TE_FL_ASSIGN_OR_RETURN(last_grad_norm_,
                         detail::clip("Optimizer::step", gradients(), max_grad_norm_));
  if (std::isfinite(last_grad_norm_)) return {};
  if (scaler != nullptr) return detail::fill(noop_, 1);
  return failed_precondition(
      "Optimizer::step: the gradient norm is " + std::to_string(last_grad_norm_) +
      "; parameters are left as they are (the loss diverged or a gradient overflowed)");
}

// Checks that the captured step is correct for every launch.
Status Optimizer::check_capture() const {
  if (device_ == nullptr) {
    return failed_precondition(
        "Optimizer::step: the stream is being captured into a graph, which would repeat this "
        "step's count and learning rate for ever; create the optimizer with capturable = true");
  }
  if (uncapturable_ != nullptr) return failed_precondition(uncapturable_);
  if (first_differs_ && steps_ == 0) {
    return failed_precondition(
        "Optimizer::step: the stream is being captured into a graph before the first step, which "
        "alone takes the gradient into the momentum without dampening; run a step before the "
        "capture");
  }
  if (detail::counted_in_capture(this)) return {};
  return failed_precondition(
      "Optimizer::step: the step that a GraphedStep captures has an optimizer that it does not "
      "count the steps of, nor give the learning rate to; name it in "
      "GraphedStepOptions::optimizer, and call any other one's step() outside");
}

Status Optimizer::step() { return step(nullptr); }
Status Optimizer::step(LossScaler& scaler) { return step(&scaler); }

Status Optimizer::step(LossScaler* scaler) {
  bool capturing = false;
  if (!home().is_host()) {
    TE_FL_ASSIGN_OR_RETURN(capturing,
                           devices::is_capturing(home(), devices::current_stream(home())));
  }
  if (capturing) TE_FL_RETURN_IF_ERROR(check_capture());
  TE_FL_RETURN_IF_ERROR(check_slots());
  TE_FL_RETURN_IF_ERROR(detail::check_fresh("Optimizer::step", gradients()));
  TE_FL_RETURN_IF_ERROR(detail::end_backwards(parameters_));
  noop_ = Tensor();
  if (scaler != nullptr) TE_FL_RETURN_IF_ERROR(unscale(*scaler));
  // On the host, clipping may refuse the gradients, so it runs before the step is counted.
  if (device_ == nullptr || capturing) TE_FL_RETURN_IF_ERROR(clip(scaler));
  if (capturing) return update(false);
  TE_FL_RETURN_IF_ERROR(refresh_masters());
  ++steps_;
  Status status;
  if (device_ != nullptr) status = write_state();
  if (status && device_ != nullptr) status = clip(scaler);
  if (status) status = update(steps_ == 1);
  if (!status) {
    --steps_;
    return status;
  }
  for (const NamedParameter& p : parameters_) p.parameter->version += detail::trained(*p.parameter);
  set_steps(steps_);
  // Quarantines take effect between two steps, even if the quarantine file cannot be written.
  if (const Status noted = step_boundary(); !noted.ok()) {
    log::once(log::Level::kWarning, "step boundary", noted.to_string());
  }
  return {};
}

}  // namespace te_fl::nn
