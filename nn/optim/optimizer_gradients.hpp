#pragma once

#include <vector>

#include "nn/optim/optimizer_slots.hpp"
#include "te_fl/comm.hpp"

// Functions on the gradients of an optimizer's parameters: validation, norm and scaling.
namespace te_fl::nn::detail {

// Refers to an optimizer's parameters; owns nothing.
struct Gradients {
  const std::vector<NamedParameter>& parameters;
  const std::vector<const OwnPart*>& parts;  // as in make_slots()
  const Comm* ranks = nullptr;               // the ranks that share sharded parameters; null: none
  const GradientBuckets* zero = nullptr;
};

// The gradients of trained parameters; with ZeRO this rank's parts.
Pointers list_pointers(const Gradients& gradients);
// FAILED_PRECONDITION with `who` and the first parameter whose gradient is stale, incomplete, or
// with ZeRO intended for another optimizer or not averaged.
Status check_fresh(const char* who, const Gradients& gradients);
// Runs the pending gradient-scale updates of the backward passes that wrote the gradients, if the
// program has not done so.
Status end_backwards(const std::vector<NamedParameter>& parameters);
// The norm of the complete gradients as F32 [1], equal on all ranks.
Status norm_into(const Gradients& gradients, const Tensor& norm);
// Scales the gradients to a norm of at most max_norm, like clip_grad_norm(). Returns the norm
// before scaling.
Result<float> clip(const char* who, const Gradients& gradients, float max_norm);
// Multiplies the gradients by min(1, max_norm / norm) on the device. Sets `noop` if the norm is not
// finite.
Status scale_by_norm(const Gradients& gradients, const Tensor& norm, float max_norm,
                     const Tensor& noop, const Device& device);
// Sets `flag`, I32 [1], to the maximum over all ranks that share a step.
Status agree_on(const Gradients& gradients, const Tensor& flag);

}  // namespace te_fl::nn::detail
