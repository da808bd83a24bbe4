#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "te_fl/nn/modules/module.hpp"
#include "te_fl/nn/optim/optimizer.hpp"

// What the host knows of a step while it is captured. Whether a backward adds to a parameter's
// gradient or overwrites it is the host's to know, and a captured graph repeats what was decided
// while it was captured.
namespace te_fl::nn::detail {

// Before a backward writes the gradient, which is allocated if there is none: whether it has to
// add; holds until wrote(). Captures that nn did not begin cannot be told apart and are taken for
// one. FAILED_PRECONDITION if the gradient would have to be allocated in a capture.
Result<bool> adds(Parameter& parameter);
void wrote(Parameter& parameter);
// As if none had ever been written.
void drop_grad(Parameter& parameter) noexcept;
// The capture that work on `device` would now go into, 0: none; whether there is one, and whether
// it is one that nn did not begin.
Result<uint64_t> capture_of(const Device& device);
Result<bool> capturing(const Device& device);
Result<bool> in_foreign_capture(const Device& device);
// Memory that the work uses and its owner may replace: it lives as long as the graph of a step that
// is being captured. Outside of that, nothing.
void keep_for_graph(std::shared_ptr<const void> memory);

// Whether the launches of what is captured now count the optimizer's steps: unless a StepCapture of
// another one, or of none, is open, that is its user's to see to.
bool counted_in_capture(const Optimizer* optimizer) noexcept;

// From its construction on, what a capture on this thread touches: a capture writes nothing, its
// launches do.
class StepCapture {
 public:
  // `optimizer`: that whose steps the launches count; may be null.
  explicit StepCapture(const Optimizer* optimizer);
  ~StepCapture();
  StepCapture(const StepCapture&) = delete;
  StepCapture& operator=(const StepCapture&) = delete;

  // The host's knowledge of a gradient, before the capture and once the graph has run.
  struct Gradient {
    bool written, stale;
  };
  struct Touched {
    Parameter* parameter;
    Tensor grad;  // the memory that the graph writes
    Gradient before, after;
    bool adds;  // to what the gradient holds when the graph is launched
  };
  // Ends it, with the parameters as they were before.
  std::vector<Touched> take();
  std::vector<std::shared_ptr<const void>> take_kept() { return std::move(kept_); }

  // Before a change of what the host knows; `adds`: the work now captured reads the gradient.
  void touch(Parameter& parameter, bool adds);
  void keep(std::shared_ptr<const void> memory) { kept_.push_back(std::move(memory)); }
  uint64_t id() const noexcept { return id_; }
  const Optimizer* optimizer() const noexcept { return optimizer_; }

 private:
  uint64_t id_;
  const Optimizer* optimizer_;
  StepCapture* outer_;
  std::vector<Touched> touched_;
  std::vector<std::shared_ptr<const void>> kept_;
};

// FAILED_PRECONDITION if the value is not the parameter's version `version` any more, which a
// forward read and its backward is to read again.
Status check_unchanged(const Parameter& parameter, uint64_t version);
// What a launch reads is there: gradients that were cleared and not written are filled with zeros,
// on the current stream. FAILED_PRECONDITION if a parameter has another gradient than the graph
// writes.
Status prepare_launch(const std::vector<StepCapture::Touched>& touched);
// The parameters as a launch leaves them.
void launched(const std::vector<StepCapture::Touched>& touched);

}  // namespace te_fl::nn::detail
