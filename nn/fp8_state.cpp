#include "nn/fp8_state.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include "nn/gradients.hpp"
#include "nn/recompute.hpp"
#include "nn/tensor_ops.hpp"

namespace te_fl::nn::detail {

namespace {

Status graph_error(const std::string& wish) {
  return failed_precondition(
      "delayed scaling: " + wish +
      "; the graph would go on with memory that is no longer the module's. Keep to the recipe that "
      "was captured, or destroy the graph first");
}

}  // namespace

Status Fp8State::adopt(Tensor history, Tensor scale) {
  auto tensors = std::make_shared<Tensors>();
  TE_FL_ASSIGN_OR_RETURN(Tensor row, history.slice(0, 0, 1));
  TE_FL_ASSIGN_OR_RETURN(Tensor amaxes, row.view({slots_}));
  for (int64_t i = 0; i < slots_; ++i) {
    TE_FL_ASSIGN_OR_RETURN(Tensor scale_slot, scale.slice(0, i, i + 1));
    TE_FL_ASSIGN_OR_RETURN(Tensor amax_slot, amaxes.slice(0, i, i + 1));
    tensors->scale_slots.push_back(std::move(scale_slot));
    tensors->amax_slots.push_back(std::move(amax_slot));
  }
  tensors->history = std::move(history);
  tensors->scale = std::move(scale);
  tensors_ = std::move(tensors);
  ++generation_;
  return {};
}

Status Fp8State::check_length(int64_t history_len) const {
  if (!defined() || history().size(0) == history_len || !held()) return {};
  return graph_error("an amax history of length " + std::to_string(history_len) +
                     " is asked for, but a captured graph uses the present one of length " +
                     std::to_string(history().size(0)));
}

Status Fp8State::ensure(int64_t history_len) {
  if (defined() && history().size(0) == history_len) return {};
  TE_FL_RETURN_IF_ERROR(check_length(history_len));
  TE_FL_ASSIGN_OR_RETURN(const bool captured, capturing(device_));
  if (captured) {
    return failed_precondition(
        "delayed scaling: a graph is being captured, and the FP8 state is not there yet or has "
        "another history length; every launch would make it anew. Run the step once before the "
        "capture");
  }
  TE_FL_ASSIGN_OR_RETURN(Tensor longer, Tensor::empty({history_len, slots_}, DType::kF32, device_));
  TE_FL_RETURN_IF_ERROR(fill(longer, 0));
  if (!defined()) {
    TE_FL_ASSIGN_OR_RETURN(Tensor ones, Tensor::empty({slots_}, DType::kF32, device_));
    TE_FL_RETURN_IF_ERROR(fill(ones, 1));
    return adopt(std::move(longer), std::move(ones));
  }
  // Row 0 is the step's running amax; rows 1, 2, ... grow newer towards the end.
  const int64_t old_len = history().size(0);
  TE_FL_ASSIGN_OR_RETURN(Tensor from0, history().slice(0, 0, 1));
  TE_FL_ASSIGN_OR_RETURN(Tensor to0, longer.slice(0, 0, 1));
  TE_FL_RETURN_IF_ERROR(copy(from0, to0));
  const int64_t kept = std::min(old_len, history_len) - 1;
  if (kept > 0) {
    TE_FL_ASSIGN_OR_RETURN(Tensor from, history().slice(0, old_len - kept, old_len));
    TE_FL_ASSIGN_OR_RETURN(Tensor to, longer.slice(0, history_len - kept, history_len));
    TE_FL_RETURN_IF_ERROR(copy(from, to));
  }
  return adopt(std::move(longer), scale());
}

Status Fp8State::retype(DType dtype) {
  const DType before = std::exchange(dtype_, dtype);
  if (before == dtype || before == DType::kF32 || !calibrated_) return {};
  if (held()) {
    dtype_ = before;
    return graph_error("gradients in " + std::string(name(dtype)) +
                       " are asked for, but a captured graph uses the scales for " +
                       std::string(name(before)));
  }
  ++generation_;
  TE_FL_ASSIGN_OR_RETURN(Tensor noop, Tensor::zeros({1}, DType::kI32, device_));
  const te_fl_tensor* scales[] = {scale()};
  te_fl_multi_tensor_scale_args args{};
  args.inputs = args.outputs = scales;
  args.inputs_count = args.outputs_count = 1;
  args.noop_flag = noop;
  args.scale = dtype == DType::kF8E4M3 ? 448.0f / 57344.0f : 57344.0f / 448.0f;
  return ops::multi_tensor_scale(args, call_options(device_));
}

Status Fp8State::load(const Tensor& from_history, const Tensor& from_scale, bool calibrated) {
  if (!defined() || history().size(0) != from_history.size(0)) {
    TE_FL_RETURN_IF_ERROR(check_length(from_history.size(0)));
    // Own storage: the given tensors stay the caller's.
    TE_FL_ASSIGN_OR_RETURN(Tensor own_history, from_history.clone());
    TE_FL_ASSIGN_OR_RETURN(Tensor own_scale, from_scale.clone());
    TE_FL_RETURN_IF_ERROR(adopt(std::move(own_history), std::move(own_scale)));
  } else {
    TE_FL_RETURN_IF_ERROR(copy(from_history, history()));
    TE_FL_RETURN_IF_ERROR(copy(from_scale, scale()));
  }
  ++generation_;
  calibrated_ = calibrated;
  dtype_ = DType::kF32;
  return {};
}

Status Fp8State::reset() {
  if (!defined()) return {};
  ++generation_;
  calibrated_ = false;
  dtype_ = DType::kF32;
  TE_FL_RETURN_IF_ERROR(fill(history(), 0));
  return fill(scale(), 1);
}

void Fp8State::use(bool foreign) {
  keep_for_graph(tensors_);
  foreign_graph_ = foreign_graph_ || foreign;
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
    TE_FL_ASSIGN_OR_RETURN(const Tensor replayed, replayed_scale(state, slot));
    spec.amax = record && !replayed.defined();  // what nobody reads is neither cleared nor computed
    if (replayed.defined()) return Tensor::empty_quantized(shape, spec, device, &replayed);
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

Result<Tensor> with_own_scale(const Tensor& tensor) {
  TE_FL_ASSIGN_OR_RETURN(const Tensor scale, tensor.scale().clone());
  const Tensor amax = tensor.amax();
  return Tensor::empty_quantized(tensor.shape(), {.dtype = tensor.dtype(), .clear_scales = false},
                                 tensor.device(), &scale, amax.defined() ? &amax : nullptr);
}

}  // namespace te_fl::nn::detail
