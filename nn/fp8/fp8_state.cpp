#include "nn/fp8/fp8_state.hpp"

#include <algorithm>
#include <cstdio>
#include <string>
#include <utility>

#include "nn/base/capture.hpp"
#include "nn/base/run_log.hpp"
#include "nn/base/tensor_ops.hpp"
#include "te_fl/log.hpp"
#include "te_fl/nn/base/item.hpp"

namespace te_fl::nn::detail {

namespace {

Status graph_error(const std::string& wish) {
  return failed_precondition(
      "delayed scaling: " + wish +
      "; the graph would go on with memory that is no longer the module's. Keep to the recipe that "
      "was captured, or destroy the graph first");
}

}  // namespace

std::shared_ptr<Fp8State> Fp8State::Weak::lock() const {
  auto shared = shared_.lock();
  if (shared == nullptr) return nullptr;
  auto state = std::make_shared<Fp8State>(slots_, device_);
  state->shared_ = std::move(shared);
  return state;
}

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
  tensors->amaxes = std::move(amaxes);
  shared_->tensors = std::move(tensors);
  ++shared_->generation;
  return {};
}

Status Fp8State::check_length(int64_t history_len) const {
  if (!defined() || history().size(0) == history_len || !held()) return {};
  return graph_error("an amax history of length " + std::to_string(history_len) +
                     " is requested, but a captured graph uses the present one of length " +
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
  // Row 0 is the running amax of the current step. Rows 1, 2, ... are ordered from old to new.
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

float largest_finite(DType dtype) { return dtype == DType::kF8E4M3 ? 448.0f : 57344.0f; }

DType dtype_of_largest(float value) {
  for (const DType dtype : {DType::kF8E4M3, DType::kF8E5M2}) {
    if (value == largest_finite(dtype)) return dtype;
  }
  return DType::kF32;
}

Status Fp8State::set_dtype(DType dtype) {
  if (dtype == shared_->dtype) return {};
  Tensor largest;
  if (dtype != DType::kF32) {
    TE_FL_ASSIGN_OR_RETURN(largest, Tensor::empty({1}, DType::kF32, Device()));
    *largest.data<float>() = largest_finite(dtype);
  }
  shared_->dtype = dtype;
  shared_->fp8_max = std::move(largest);
  return {};
}

Status Fp8State::retype(DType dtype) {
  const DType before = shared_->dtype;
  if (before == dtype || before == DType::kF32 || !calibrated()) return set_dtype(dtype);
  if (held()) {
    return graph_error("gradients in " + std::string(name(dtype)) +
                       " are requested, but a captured graph uses the scales for " +
                       std::string(name(before)));
  }
  TE_FL_ASSIGN_OR_RETURN(Tensor noop, Tensor::zeros({1}, DType::kI32, device_));
  const Tensor largest = shared_->fp8_max;
  TE_FL_RETURN_IF_ERROR(set_dtype(dtype));
  ++shared_->generation;
  const te_fl_tensor* scales[] = {scale()};
  te_fl_multi_tensor_scale_args args{};
  args.inputs = args.outputs = scales;
  args.inputs_count = args.outputs_count = 1;
  args.noop_flag = noop;
  args.scale = largest_finite(dtype) / largest_finite(before);
  Status scaled = ops::multi_tensor_scale(args, call_options(device_));
  if (!scaled.ok()) {  // restores the type that the scales are for
    shared_->dtype = before;
    shared_->fp8_max = largest;
  }
  return scaled;
}

Status Fp8State::load(const Tensor& from_history, const Tensor& from_scale, bool calibrated,
                      DType dtype) {
  forget_updates();
  if (!defined() || history().size(0) != from_history.size(0)) {
    TE_FL_RETURN_IF_ERROR(check_length(from_history.size(0)));
    // Clones the tensors, since the caller keeps those that were passed in.
    TE_FL_ASSIGN_OR_RETURN(Tensor own_history, from_history.clone());
    TE_FL_ASSIGN_OR_RETURN(Tensor own_scale, from_scale.clone());
    TE_FL_RETURN_IF_ERROR(adopt(std::move(own_history), std::move(own_scale)));
  } else {
    TE_FL_RETURN_IF_ERROR(copy(from_history, history()));
    TE_FL_RETURN_IF_ERROR(copy(from_scale, scale()));
  }
  ++shared_->generation;
  shared_->calibrated = calibrated;
  return set_dtype(dtype);
}

Status Fp8State::drop_amaxes() {
  ++shared_->generation;
  return fill(amaxes(), 0);
}

Status Fp8State::reset() {
  if (!defined()) return {};
  forget_updates();
  ++shared_->generation;
  shared_->calibrated = false;
  TE_FL_RETURN_IF_ERROR(set_dtype(DType::kF32));
  TE_FL_RETURN_IF_ERROR(fill(history(), 0));
  return fill(scale(), 1);
}

void Fp8State::use(bool foreign) {
  keep_for_graph(shared_->tensors);
  if (foreign) shared_->foreign_graph = true;
}

DType fp8_dtype(const Recipe& recipe, Role role) {
  Fp8Format format = Fp8Format::kE4M3;
  if (const auto* delayed = std::get_if<DelayedScaling>(&recipe)) format = delayed->format;
  if (const auto* current = std::get_if<Float8CurrentScaling>(&recipe)) format = current->format;
  if (const auto* block = std::get_if<Float8BlockScaling>(&recipe)) format = block->format;
  if (const auto* mx = std::get_if<MXFP8BlockScaling>(&recipe)) format = mx->format;
  return role == Role::kGradient && format == Fp8Format::kHybrid ? DType::kF8E5M2 : DType::kF8E4M3;
}

Result<Tensor> empty_quantized(const Recipe& recipe, Role role, std::span<const int64_t> shape,
                               Copies copies, const Device& device, const Fp8State& state,
                               int64_t slot) {
  QuantSpec spec;
  spec.dtype = fp8_dtype(recipe, role);
  spec.rowwise = copies.rowwise;
  spec.columnwise = copies.columnwise;
  spec.clear_scales = false;
  if (std::holds_alternative<DelayedScaling>(recipe)) {
    TE_FL_ASSIGN_OR_RETURN(const Tensor replayed, replayed_scale(&state, slot));
    spec.amax = !replayed.defined();  // the second run collects no amax
    if (replayed.defined()) return Tensor::empty_quantized(shape, spec, device, &replayed);
    return Tensor::empty_quantized(shape, spec, device, &state.scale_slot(slot),
                                   &state.amax_slot(slot));
  }
  if (const auto* current = std::get_if<Float8CurrentScaling>(&recipe)) {
    spec.compute_scale = true;
    spec.pow2_scale = current->pow2_scale;
    spec.amax_epsilon = current->amax_epsilon;
    return Tensor::empty_quantized(shape, spec, device);
  }
  if (std::holds_alternative<MXFP8BlockScaling>(recipe)) {
    spec.scaling = Scaling::kMXFP8;
    return Tensor::empty_quantized(shape, spec, device);
  }
  if (const auto* custom = std::get_if<CustomScaling>(&recipe)) {
    return internal_error("empty_quantized: the quantisers of \"" + custom->name +
                          "\" allocate their results");
  }
  const auto& block = std::get<Float8BlockScaling>(recipe);
  spec.scaling = role == Role::kWeight ? Scaling::kBlock128x128 : Scaling::kBlock1x128;
  spec.pow2_scale = block.pow2_scale;
  spec.amax_epsilon = block.amax_epsilon;
  return Tensor::empty_quantized(shape, spec, device);
}

Status warn_if_saturated(Fp8State& state, int64_t slot, const Tensor& codes, const char* what,
                         const std::string& owner) {
  if (!codes.quantized() || !codes.has_rowwise()) return {};
  TE_FL_ASSIGN_OR_RETURN(const bool captured, capturing(state.device()));
  if (captured) return {};
  TE_FL_ASSIGN_OR_RETURN(const float amax, item(state.amax_slot(slot)));
  constexpr float kLargest = 448;  // the largest E4M3 value
  if (!(amax > kLargest) || !state.warns_now()) return {};
  TE_FL_ASSIGN_OR_RETURN(const Tensor bytes, codes.rowwise_codes().to(Device()));
  constexpr uint8_t kMagnitude = 0x7F, kLargestCode = 0x7E;
  const auto* first = bytes.data<uint8_t>();
  const auto at_bound = std::count_if(first, first + bytes.numel(), [](uint8_t code) {
    return (code & kMagnitude) == kLargestCode;
  });
  char share[32];
  std::snprintf(share, sizeof share, "%.2g",
                100.0 * static_cast<double>(at_bound) / static_cast<double>(bytes.numel()));
  log::warning(
      "delayed scaling: a forward without gradients came before any update of the scales of " +
      owner + ", so it computes with the initial scale 1: " + share + " % of its " + what +
      " saturate at 448. Train a step, calibrate or load FP8 state before, or use "
      "Float8CurrentScaling");
  return {};
}

Result<Tensor> with_own_scale(const Tensor& tensor) {
  TE_FL_ASSIGN_OR_RETURN(const Tensor scale, tensor.scale().clone());
  const Tensor amax = tensor.amax();
  return Tensor::empty_quantized(tensor.shape(), {.dtype = tensor.dtype(), .clear_scales = false},
                                 tensor.device(), &scale, amax.defined() ? &amax : nullptr);
}

}  // namespace te_fl::nn::detail
