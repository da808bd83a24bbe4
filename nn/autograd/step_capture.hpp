#pragma once

#include <memory>
#include <vector>

#include "nn/autograd/parameter_state.hpp"
#include "nn/base/capture.hpp"
#include "te_fl/tensor.hpp"

namespace te_fl::nn {

struct Parameter;

namespace detail {

// The capture of a training step. Whether a backward adds to a parameter's gradient or overwrites
// it is the host's to know, and a captured graph repeats what was decided while it was captured; so
// this notes what a capture on this thread changes of that: a capture writes nothing, its launches
// do.
class StepCapture {
 public:
  // `counter`: the optimizer whose steps the launches count; may be null.
  explicit StepCapture(const void* counter);
  ~StepCapture();
  StepCapture(const StepCapture&) = delete;
  StepCapture& operator=(const StepCapture&) = delete;

  // The host's knowledge of a gradient, before the capture and once the graph has run.
  struct Gradient {
    bool written, stale;
  };
  struct Touched {
    Parameter* parameter;
    ParameterState* state;
    Tensor grad;  // the memory that the graph writes
    Gradient before, after;
    bool adds;  // to what the gradient holds when the graph is launched
  };
  // Ends it, with the parameters as they were before.
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

// Called before a change of what the host knows of a gradient, for the step that is being captured
// on this thread, if there is one. `adds`: the work now captured reads the gradient.
void touch(Parameter* parameter, ParameterState& state, const Tensor& grad, bool adds);

// True if the launches of what is captured now count the optimizer's steps: unless a StepCapture of
// another one, or of none, is open, that is its user's to see to.
bool counted_in_capture(const void* optimizer) noexcept;

}  // namespace detail
}  // namespace te_fl::nn
