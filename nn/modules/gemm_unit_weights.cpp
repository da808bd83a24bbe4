// The weight that a GemmUnit's products read: the parameter's own value, or a copy that is
// quantised for each forward or cached.
#include "nn/autograd/parameter.hpp"
#include "nn/autograd/recompute.hpp"
#include "nn/base/capture.hpp"
#include "nn/base/run_log.hpp"
#include "nn/base/tensor_ops.hpp"
#include "nn/fp8/custom_operands.hpp"
#include "nn/fp8/fp8_values.hpp"
#include "nn/modules/gemm_unit.hpp"

namespace te_fl::nn::detail {

Result<Tensor> GemmUnit::written_copy(const Use& use) const {
  if (copy_ == nullptr) return Tensor();
  Tensor copy = copy_->fresh(weight_->version, *use.mode.recipe);
  if (!copy.defined() || spec_.device.is_host()) return copy;
  // During a capture the optimizer's FP8 copy is not used: the graph would keep reading its memory,
  // which the next step replaces.
  TE_FL_ASSIGN_OR_RETURN(
      const bool capturing,
      devices::is_capturing(spec_.device, devices::current_stream(spec_.device)));
  return capturing ? Tensor() : copy;
}

Result<GemmUnit::Weight> GemmUnit::quantised_weight(const Use& use, bool columnwise) {
  columnwise = columnwise && use.mode.quantises_gradients();
  if (const CustomScaling* custom = use.mode.custom()) {
    TE_FL_ASSIGN_OR_RETURN(const Tensor values, cast(weight_->value, spec_.activation_dtype));
    TE_FL_ASSIGN_OR_RETURN(QuantisedOperand made,
                           quantise_custom(quantisers_of(*custom).weight, values,
                                           {.rowwise = true, .columnwise = columnwise}));
    return Weight(std::move(made.rowwise), std::move(made.columnwise));
  }
  TE_FL_ASSIGN_OR_RETURN(Tensor weight,
                         empty_quantized(*use.mode.recipe, Role::kWeight, weight_->value.shape(),
                                         {.rowwise = true, .columnwise = columnwise}, spec_.device,
                                         *forward_, kWeightSlot));
  if (pending_ != nullptr && !use.unscaled) {  // otherwise product() checks for saturation
    pending_->emplace_back(weight_->value, weight);
    return Weight(weight);
  }
  TE_FL_RETURN_IF_ERROR(quantize(weight_->value, weight));
  return Weight(weight);
}

Result<GemmUnit::Weight> GemmUnit::make_weight(const Use& use, bool columnwise) {
  if (weight_->value.quantized()) {
    TE_FL_ASSIGN_OR_RETURN(Tensor values, weight_->read(spec_.activation_dtype));
    return Weight(std::move(values));
  }
  if (!use.mode.fp8) {
    TE_FL_ASSIGN_OR_RETURN(Tensor values, cast(weight_->value, spec_.activation_dtype));
    return Weight(std::move(values));
  }
  TE_FL_ASSIGN_OR_RETURN(Tensor copy, written_copy(use));
  if (copy.defined()) return Weight(std::move(copy));
  return quantised_weight(use, columnwise);
}

bool GemmUnit::Kept::fits(const Use& use) const {
  if (!weight.tensor.defined() || fp8 != use.mode.fp8) return false;
  if (!fp8) return true;
  const bool columns = weight.across.defined() || weight.tensor.has_columnwise();
  return *recipe == *use.mode.recipe &&
         (columns || !use.training || !use.mode.quantises_gradients());
}

Result<GemmUnit::Weight> GemmUnit::gemm_weight(const Use& use, const ForwardOptions& options) {
  const std::optional<bool> first = options.is_first_microbatch;
  const bool flagged = options.reuse_weights.defined();
  if (flagged && first.has_value()) {
    return invalid_argument(
        "is_first_microbatch and reuse_weights are both set, and say the same thing; set one of "
        "them");
  }
  if (use.mode.fp8 && weight_->value.quantized()) return own_codes(use);
  if (flagged) return flagged_weight(use, options.reuse_weights);
  // Uses the parameter's tensor directly, which may be borrowed, and caches nothing.
  if (!use.mode.fp8 && weight_->value.dtype() == spec_.activation_dtype) {
    return Weight(weight_->value);
  }
  if (!first.has_value()) {
    // Does not cache a quantised FP8-only weight, since that would use more memory than FP8 saves.
    const bool keeps = !use.training && !weight_->value.quantized();
    return keeps ? inference_weight(use) : make_weight(use, use.training);
  }
  TE_FL_ASSIGN_OR_RETURN(const uint64_t capture, find_capture(spec_.device));
  const bool stale = !cached_.fits(use) || cached_.version != weight_->version;
  if (!*first && capture != 0 && !stale && cached_.capture != capture) {
    return failed_precondition(
        "a forward with is_first_microbatch = false is captured, and the weights that it reuses "
        "were computed outside; every launch would read those of today. With is_first_microbatch a "
        "graph holds all the microbatches of a step; for a graph of one use reuse_weights");
  }
  if (*first || stale) {
    TE_FL_ASSIGN_OR_RETURN(Weight weight, make_weight(use, use.training));
    cached_ = {std::move(weight), weight_->version, use.mode.fp8, use.mode.recipe, capture};
  }
  return cached_.weight;
}

namespace {

// The recipes that read weights of codes with this scaling, for messages.
const char* readers_of(Scaling scaling) {
  switch (scaling) {
    case Scaling::kTensor:
      return "; codes scaled by tensor are for DelayedScaling and Float8CurrentScaling";
    case Scaling::kMXFP8:
      return "; codes of MXFP8 are for MXFP8BlockScaling";
    case Scaling::kNVFP4:
      return "; codes of NVFP4 are for NVFP4BlockScaling";
    default:
      return "; codes scaled by blocks are for Float8BlockScaling";
  }
}

// The scaling of weights under a recipe.
Scaling weight_scaling(const Recipe& recipe) {
  if (std::holds_alternative<Float8BlockScaling>(recipe)) return Scaling::kBlock128x128;
  return std::holds_alternative<MXFP8BlockScaling>(recipe) ? Scaling::kMXFP8 : Scaling::kTensor;
}

}  // namespace

Result<GemmUnit::Weight> GemmUnit::own_codes(const Use& use) {
  const bool blocks = weight_->value.scaling() != Scaling::kTensor;
  if (use.mode.custom() == nullptr &&
      weight_scaling(*use.mode.recipe) != weight_->value.scaling()) {
    return failed_precondition("the weight " + weight_->value.describe() +
                               " was created under quantized_model_init, and the autocast's recipe "
                               "is " +
                               describe(*use.mode.recipe) + readers_of(weight_->value.scaling()));
  }
  const bool columns = use.training && use.mode.quantises_gradients();
  if (weight_->value.scaling() == Scaling::kNVFP4) {
    Weight weight(weight_->value, columns ? weight_->value.columnwise_only() : Tensor());
    TE_FL_RETURN_IF_ERROR(read_nvfp4(weight.tensor));
    return weight;
  }
  if (!columns || weight_->value.has_columnwise()) return Weight(weight_->value);
  if (blocks) {
    return failed_precondition("a training forward reads the weight " + weight_->value.describe() +
                               ", which is borrowed without the column-wise copy that its backward "
                               "reads; lend both copies");
  }
  TE_FL_ASSIGN_OR_RETURN(const bool captured, capturing(spec_.device));
  if (captured) {
    return failed_precondition(
        "a training forward is captured, and the FP8-only weight " + weight_->value.describe() +
        " has no column-wise copy yet, whose memory would be the graph's; run a step before the "
        "capture");
  }
  TE_FL_ASSIGN_OR_RETURN(Tensor both, with_columns(weight_->value));
  // The old tensor is freed on the stream that allocated it, possibly another one, so this stream
  // is synchronised first.
  if (!spec_.device.is_host()) {
    TE_FL_RETURN_IF_ERROR(
        devices::synchronize(spec_.device, devices::current_stream(spec_.device)));
  }
  weight_->value = std::move(both);
  return Weight(weight_->value);
}

Result<GemmUnit::Weight> GemmUnit::repeated_weight(const Use& use) {
  TE_FL_ASSIGN_OR_RETURN(Tensor kept, replay_weight(this, spec_.device));
  if (kept.defined()) return Weight(std::move(kept));
  if (use.mode.fp8 && weight_->value.quantized()) return own_codes(use);
  if (!use.mode.fp8 && weight_->value.dtype() == spec_.activation_dtype) {
    return Weight(weight_->value);
  }
  return make_weight(use, use.training);
}

Result<GemmUnit::Weight> GemmUnit::inference_weight(const Use& use) {
  TE_FL_ASSIGN_OR_RETURN(const bool captured, capturing(spec_.device));
  if (captured) return make_weight(use, false);
  void* stream = devices::current_stream(spec_.device);
  const bool fresh =
      serving_.fits(use) && serving_.version == weight_->version && serving_.stream == stream &&
      (use.mode.delayed() == nullptr || serving_.generation == forward_->generation());
  if (fresh) return serving_.weight;
  // A borrowed weight is cached from the second read of the same version on. An owner that lends a
  // new version for each call would waste the cache's memory.
  const bool keeps =
      !weight_->internals().owners_version.has_value() || serving_.version == weight_->version;
  serving_ = {};  // frees the memory for the new weight
  TE_FL_ASSIGN_OR_RETURN(Weight weight, make_weight(use, false));
  if (keeps) serving_.weight = weight;
  serving_.version = weight_->version;
  serving_.fp8 = use.mode.fp8;
  serving_.recipe = use.mode.recipe;
  serving_.generation = forward_->generation();
  serving_.stream = stream;
  return weight;
}

Result<GemmUnit::Weight> GemmUnit::flagged_weight(const Use& use, const Tensor& flag) {
  if (flag.dtype() != DType::kF32 || flag.numel() != 1 || flag.device() != spec_.device) {
    return invalid_argument("reuse_weights is " + flag.describe() + "; it must be f32[1] on " +
                            to_string(spec_.device));
  }
  // Quantisers of a custom recipe write no memory of te-fl's, so their weights are made anew.
  if (!use.mode.fp8 || use.mode.custom() != nullptr) return make_weight(use, use.training);
  bool capturing = false;
  if (!spec_.device.is_host()) {
    TE_FL_ASSIGN_OR_RETURN(
        capturing, devices::is_capturing(spec_.device, devices::current_stream(spec_.device)));
  }
  if (!flagged_.fits(use)) {
    if (capturing) {
      return failed_precondition(
          "a forward with reuse_weights is captured before its weights were ever quantised so; run "
          "it once before the capture");
    }
    TE_FL_ASSIGN_OR_RETURN(Weight weight, quantised_weight(use, use.training));
    flagged_ = {std::move(weight), weight_->version, use.mode.fp8, use.mode.recipe, 0};
  } else if (capturing || flagged_.version == weight_->version) {
    TE_FL_RETURN_IF_ERROR(quantize(weight_->value, flagged_.weight.tensor, flag));
  } else {
    TE_FL_RETURN_IF_ERROR(quantize(weight_->value, flagged_.weight.tensor));
    flagged_.version = weight_->version;
  }
  keep_for_graph(std::make_shared<Tensor>(flagged_.weight.tensor));
  return flagged_.weight;
}

}  // namespace te_fl::nn::detail
