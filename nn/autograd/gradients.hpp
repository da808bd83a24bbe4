#pragma once

#include <cstdint>
#include <vector>

#include "nn/autograd/parameter.hpp"
#include "nn/autograd/step_capture.hpp"

// The gradients of a step.
namespace te_fl::nn::detail {

// Names the tensor that an op writes a gradient to which it can only set, not add: the parameter's
// own, or scratch that commit() adds to it.
class GradTarget {
 public:
  static Result<GradTarget> open(Parameter* parameter);  // null or frozen: an undefined target
  const Tensor& tensor() const noexcept { return tensor_; }
  Status commit();

 private:
  Parameter* parameter_ = nullptr;
  Tensor tensor_;
  bool scratch_ = false;
};

// FAILED_PRECONDITION if the value is not the parameter's version `version` any more, which a
// forward read and its backward is to read again.
Status check_unchanged(const Parameter& parameter, uint64_t version);
// Makes sure that what a launch reads is there: gradients that were cleared and not written are
// filled with zeros, on the current stream. FAILED_PRECONDITION if a parameter has another gradient
// than the graph writes.
Status prepare_launch(const std::vector<StepCapture::Touched>& touched);
// The parameters as a launch leaves them.
void launched(const std::vector<StepCapture::Touched>& touched);

}  // namespace te_fl::nn::detail
