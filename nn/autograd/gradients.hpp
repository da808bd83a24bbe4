#pragma once

#include <cstdint>
#include <vector>

#include "nn/autograd/parameter.hpp"
#include "nn/autograd/step_capture.hpp"

// Helpers for the gradients of a training step.
namespace te_fl::nn::detail {

// The output tensor for an op that can only overwrite a gradient, not add to it: the parameter's
// gradient itself, or scratch that commit() adds to it.
class GradTarget {
 public:
  static Result<GradTarget> open(Parameter* parameter);  // null or frozen: undefined
  const Tensor& tensor() const noexcept { return tensor_; }
  Status commit();

 private:
  Parameter* parameter_ = nullptr;
  Tensor tensor_;
  bool scratch_ = false;
};

// FAILED_PRECONDITION if the parameter's version differs from `version`, that is, if the parameter
// was written after the forward pass, and the backward pass would read the new value.
Status check_unchanged(const Parameter& parameter, uint64_t version);
// Prepares the gradients that a graph's launch reads. Gradients that were cleared and not written
// are filled with zeros on the current stream. FAILED_PRECONDITION if a parameter has another
// gradient tensor than the graph writes.
Status prepare_launch(const std::vector<StepCapture::Touched>& touched);
// Updates the host's flags of the gradients after a launch of the graph.
void launched(const std::vector<StepCapture::Touched>& touched);

}  // namespace te_fl::nn::detail
