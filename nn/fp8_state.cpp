#include "nn/fp8_state.hpp"

#include <algorithm>

#include "nn/tensor_ops.hpp"

namespace te_fl::nn::detail {

Status Fp8State::make_slots() {
  scale_slots_.clear();
  amax_slots_.clear();
  TE_FL_ASSIGN_OR_RETURN(Tensor row, history_.slice(0, 0, 1));
  TE_FL_ASSIGN_OR_RETURN(Tensor amaxes, row.view({slots_}));
  for (int64_t i = 0; i < slots_; ++i) {
    TE_FL_ASSIGN_OR_RETURN(Tensor scale, scale_.slice(0, i, i + 1));
    TE_FL_ASSIGN_OR_RETURN(Tensor amax, amaxes.slice(0, i, i + 1));
    scale_slots_.push_back(std::move(scale));
    amax_slots_.push_back(std::move(amax));
  }
  return {};
}

Status Fp8State::ensure(int64_t history_len, const Device& device) {
  if (defined() && history_.size(0) == history_len) return {};
  TE_FL_ASSIGN_OR_RETURN(Tensor history, Tensor::empty({history_len, slots_}, DType::kF32, device));
  TE_FL_RETURN_IF_ERROR(fill(history, 0));
  if (!defined()) {
    TE_FL_ASSIGN_OR_RETURN(Tensor scale, Tensor::empty({slots_}, DType::kF32, device));
    TE_FL_RETURN_IF_ERROR(fill(scale, 1));
    return assign(std::move(history), std::move(scale));
  }
  // Row 0 is the step's running amax; rows 1, 2, ... grow newer towards the end.
  const int64_t old_len = history_.size(0);
  TE_FL_ASSIGN_OR_RETURN(Tensor from0, history_.slice(0, 0, 1));
  TE_FL_ASSIGN_OR_RETURN(Tensor to0, history.slice(0, 0, 1));
  TE_FL_RETURN_IF_ERROR(copy(from0, to0));
  const int64_t kept = std::min(old_len, history_len) - 1;
  if (kept > 0) {
    TE_FL_ASSIGN_OR_RETURN(Tensor from, history_.slice(0, old_len - kept, old_len));
    TE_FL_ASSIGN_OR_RETURN(Tensor to, history.slice(0, history_len - kept, history_len));
    TE_FL_RETURN_IF_ERROR(copy(from, to));
  }
  return assign(std::move(history), scale_);
}

Status Fp8State::assign(Tensor history, Tensor scale) {
  history_ = std::move(history);
  scale_ = std::move(scale);
  scales_changed();
  if (defined()) return make_slots();
  scale_slots_.clear();
  amax_slots_.clear();
  return {};
}

DType fp8_dtype(const Recipe& recipe, Role role) {
  Fp8Format format = Fp8Format::kE4M3;
  if (const auto* delayed = std::get_if<DelayedScaling>(&recipe)) format = delayed->format;
  if (const auto* current = std::get_if<Float8CurrentScaling>(&recipe)) format = current->format;
  return role == Role::kGradient && format == Fp8Format::kHybrid ? DType::kF8E5M2 : DType::kF8E4M3;
}

Result<Tensor> empty_quantized(const Recipe& recipe, Role role, std::span<const int64_t> shape,
                               Copies copies, const Device& device, const Fp8State& state,
                               int64_t slot, bool record) {
  QuantSpec spec;
  spec.dtype = fp8_dtype(recipe, role);
  spec.rowwise = copies.rowwise;
  spec.columnwise = copies.columnwise;
  spec.clear_scales = false;
  if (std::holds_alternative<DelayedScaling>(recipe)) {
    return Tensor::empty_quantized(shape, spec, device, &state.scale_slot(slot),
                                   record ? &state.amax_slot(slot) : nullptr);
  }
  if (const auto* current = std::get_if<Float8CurrentScaling>(&recipe)) {
    spec.compute_scale = true;
    spec.pow2_scale = current->pow2_scale;
    spec.amax_epsilon = current->amax_epsilon;
    // The op writes the scale; given storage for it spares the constructor's initial 1.
    TE_FL_ASSIGN_OR_RETURN(Tensor scale, Tensor::empty({1}, DType::kF32, device));
    return Tensor::empty_quantized(shape, spec, device, &scale);
  }
  const auto& block = std::get<Float8BlockScaling>(recipe);
  spec.scaling = role == Role::kWeight ? Scaling::kBlock128x128 : Scaling::kBlock1x128;
  spec.pow2_scale = block.pow2_scale;
  spec.amax_epsilon = block.amax_epsilon;
  return Tensor::empty_quantized(shape, spec, device);
}

}  // namespace te_fl::nn::detail
