#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "te_fl/nn/module.hpp"

// What the host knows of a step while it is captured. Whether a backward adds to a parameter's
// gradient or overwrites it is the host's to know, and a captured graph repeats what was decided
// while it was captured.
namespace te_fl::nn::detail {

// Whether a backward now has to add; holds until wrote(). Captures that nn did not begin cannot be
// told apart and are taken for one.
Result<bool> adds(Parameter& parameter);
void wrote(Parameter& parameter);
// Memory that the work uses and its owner may replace: it lives as long as the graph of a step that
// is being captured. Outside of that, nothing.
void keep_for_graph(const Tensor& tensor);

// From its construction on, what a capture on this thread touches: a capture writes nothing, its
// launches do.
class StepCapture {
 public:
  StepCapture();
  ~StepCapture();
  StepCapture(const StepCapture&) = delete;
  StepCapture& operator=(const StepCapture&) = delete;

  // A parameter and whether its gradient is written once the graph has run.
  struct Touched {
    Parameter* parameter;
    bool before, after;
  };
  // Ends it, with the parameters as they were before.
  std::vector<Touched> take();
  std::vector<Tensor> take_kept() { return std::move(kept_); }

  void touch(Parameter& parameter);
  void keep(const Tensor& tensor) { kept_.push_back(tensor); }
  uint64_t id() const noexcept { return id_; }

 private:
  uint64_t id_;
  StepCapture* outer_;
  std::vector<Touched> touched_;
  std::vector<Tensor> kept_;
};

// The parameters as a launch leaves them.
void launched(const std::vector<StepCapture::Touched>& touched);

}  // namespace te_fl::nn::detail
