#pragma once

#include <memory>
#include <vector>

#include "nn/autograd/parameter_state.hpp"
#include "nn/base/capture.hpp"
#include "te_fl/tensor.hpp"

namespace te_fl::nn {

struct Parameter;

namespace detail {

// The capture of a training step. The host decides whether a backward pass adds to a gradient or
// overwrites it, and a captured graph repeats the decision of the capture. Therefore this object
// records how a capture on this thread changes the host's flags. The capture itself computes no
// gradients; only the graph's launches do.
class StepCapture {
 public:
  // `counter`: the optimizer whose steps the launches count; may be null.
  explicit StepCapture(const void* counter);
  ~StepCapture();
  StepCapture(const StepCapture&) = delete;
  StepCapture& operator=(const StepCapture&) = delete;

  // The host's flags for a gradient before the capture and after the graph has run.
  struct Gradient {
    bool written, stale;
  };
  struct Touched {
    Parameter* parameter;
    ParameterState* state;
    Tensor grad;  // the memory that the graph writes
    Gradient before, after;
    bool adds;  // the graph adds to the gradient's value at launch
  };
  // Ends the capture and restores the parameters' flags. Returns the parameters that the capture
  // touched.
  std::vector<Touched> take();
  std::vector<std::shared_ptr<const void>> take_kept() { return capture_.take_kept(); }

  const void* counter() const noexcept { return counter_; }

 private:
  friend void touch(Parameter* parameter, ParameterState& state, const Tensor& grad, bool adds);
  Capture capture_;
  const void* counter_;
  StepCapture* outer_;
  std::vector<Touched> touched_;
};

// Must be called before the host's flags of a gradient change. Records the change for the step that
// is being captured on this thread, if any. `adds`: the captured work reads the gradient.
void touch(Parameter* parameter, ParameterState& state, const Tensor& grad, bool adds);

// False if launches of the graph being captured would not count the steps of `optimizer`, because
// the open StepCapture has another optimizer or none. True otherwise, also if no StepCapture is
// open; counting the steps is then up to the program.
bool counted_in_capture(const void* optimizer) noexcept;

}  // namespace detail
}  // namespace te_fl::nn
