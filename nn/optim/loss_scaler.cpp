#include "te_fl/nn/optim/loss_scaler.hpp"

#include <algorithm>
#include <cmath>
#include <string>

#include "nn/base/capture.hpp"
#include "nn/base/tensor_ops.hpp"
#include "te_fl/device.hpp"

namespace te_fl::nn {
namespace {

Status check(const char* field, double value, bool good, const char* rule) {
  if (good) return {};
  return invalid_argument(std::string("LossScaler: ") + field + " is " + std::to_string(value) +
                          "; it must be " + rule);
}

Status check_scale(float scale) {
  return check("the scale", scale, std::isfinite(scale) && scale >= 1, "finite and at least 1");
}

}  // namespace

Result<std::unique_ptr<LossScaler>> LossScaler::create(const LossScalerOptions& o) {
  TE_FL_RETURN_IF_ERROR(check_scale(o.init_scale));
  TE_FL_RETURN_IF_ERROR(check("growth_factor", o.growth_factor,
                              std::isfinite(o.growth_factor) && o.growth_factor >= 1,
                              "finite and at least 1"));
  TE_FL_RETURN_IF_ERROR(check("backoff_factor", o.backoff_factor,
                              o.backoff_factor > 0 && o.backoff_factor <= 1,
                              "greater than 0 and at most 1"));
  TE_FL_RETURN_IF_ERROR(check("growth_interval", static_cast<double>(o.growth_interval),
                              o.growth_interval >= 1, "at least 1"));
  std::unique_ptr<LossScaler> scaler(new LossScaler(o));
  TE_FL_ASSIGN_OR_RETURN(scaler->scale_, Tensor::empty({1}, DType::kF32, o.device));
  TE_FL_ASSIGN_OR_RETURN(scaler->found_inf_, Tensor::zeros({1}, DType::kI32, o.device));
  scaler->flags_ = {scaler->found_inf_};
  scaler->state_.scale = o.init_scale;
  TE_FL_RETURN_IF_ERROR(scaler->write_scale());
  return scaler;
}

Status LossScaler::write_scale() { return detail::fill(scale_, state_.scale); }

void LossScaler::watch(const Tensor& flag) {
  const auto same = [&](const Tensor& t) { return t.raw_data() == flag.raw_data(); };
  if (std::ranges::none_of(flags_, same)) flags_.push_back(flag);
}

Result<bool> LossScaler::update() {
  const Device device = scale_.device();
  TE_FL_ASSIGN_OR_RETURN(const bool captured, detail::capturing(device));
  if (captured) {
    return failed_precondition(
        "LossScaler::update: the stream is being captured into a graph, and whether a step "
        "overflowed is known when it has run; call update() after each launch");
  }
  std::vector<int32_t> values(flags_.size());
  void* const stream = devices::current_stream(device);
  for (size_t i = 0; i < flags_.size(); ++i) {
    TE_FL_RETURN_IF_ERROR(devices::copy(Device(), &values[i], device, flags_[i].raw_data(),
                                        sizeof values[i], stream));
  }
  TE_FL_RETURN_IF_ERROR(devices::synchronize(device, stream));
  bool found = false;
  for (size_t i = 0; i < flags_.size(); ++i) {
    if (values[i] == 0) continue;
    found = true;
    // Clears the flag of non-finite gradients, so that it does not count again if its optimizer
    // does not step before the next update.
    TE_FL_RETURN_IF_ERROR(detail::fill(flags_[i], 0));
  }
  const float before = state_.scale;
  if (found) {
    state_ = {std::max(state_.scale * options_.backoff_factor, 1.0f), 0};
  } else if (++state_.good_steps == options_.growth_interval) {
    const float grown = state_.scale * options_.growth_factor;
    state_ = {std::isfinite(grown) ? grown : state_.scale, 0};
  }
  if (state_.scale != before) TE_FL_RETURN_IF_ERROR(write_scale());
  return found;
}

Status LossScaler::load_state(State state) {
  TE_FL_RETURN_IF_ERROR(check_scale(state.scale));
  TE_FL_RETURN_IF_ERROR(check("good_steps", static_cast<double>(state.good_steps),
                              state.good_steps >= 0 && state.good_steps < options_.growth_interval,
                              "at least 0 and less than growth_interval"));
  state_ = state;
  return write_scale();
}

}  // namespace te_fl::nn
