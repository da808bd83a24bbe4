#pragma once

#include <vector>

#include "nn/optim/optimizer_slots.hpp"
#include "te_fl/comm.hpp"

// The gradients of an optimizer's parameters: their state, their norm, and their scaling.
namespace te_fl::nn::detail {

// Views of what they name.
struct Gradients {
  const std::vector<NamedParameter>& parameters;
  const std::vector<const OwnPart*>& parts;  // as make_slots() takes them
  const Comm* ranks = nullptr;  // those that hold the rest of divided parameters, or null
  const GradientBuckets* zero = nullptr;
};

// The gradients of those that are trained; with ZeRO this rank's parts.
Pointers pointers_of(const Gradients& gradients);
// FAILED_PRECONDITION naming `who` and the first parameter whose gradient is an older step's, not
// all there yet, or with ZeRO not for this caller or not averaged.
Status check_fresh(const char* who, const Gradients& gradients);
// Ends the backwards that wrote the gradients, if nobody has: their scales' updates are still to be
// made.
Status end_backwards(const std::vector<NamedParameter>& parameters);
// The norm of the whole gradients, F32 [1], the same on all ranks.
Status norm_into(const Gradients& gradients, const Tensor& norm);
// Scales the gradients to a norm of at most max_norm; the norm before. As clip_grad_norm().
Result<float> clip(const char* who, const Gradients& gradients, float max_norm);
// Multiplies them on the device by min(1, max_norm / norm), and sets `noop` where one is not
// finite.
Status scale_by_norm(const Gradients& gradients, const Tensor& norm, float max_norm,
                     const Tensor& noop, const Device& device);
// `flag`, I32 [1], becomes the largest of all ranks that share a step.
Status agree_on(const Gradients& gradients, const Tensor& flag);

}  // namespace te_fl::nn::detail
