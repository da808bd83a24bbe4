#pragma once

#include <cstdint>
#include <vector>

#include "te_fl/nn/module.hpp"

// Whether a backward adds to a parameter's gradient or overwrites it is the host's to know, and a
// captured graph repeats what was decided while it was captured.
namespace te_fl::nn::detail {

// Whether a backward now has to add. Mutable parameters only: what it returns for one holds until
// wrote().
Result<bool> adds(Parameter& parameter);
void wrote(Parameter& parameter);

// The gradients that a capture on this thread touches, from begin() on: a capture writes nothing,
// its launches do.
class GradientCapture {
 public:
  GradientCapture();
  ~GradientCapture();
  GradientCapture(const GradientCapture&) = delete;
  GradientCapture& operator=(const GradientCapture&) = delete;

  // A parameter and whether its gradient is written once the graph has run.
  struct Touched {
    Parameter* parameter;
    bool before, after;
  };
  // Ends it, with the parameters as they were before.
  std::vector<Touched> take();

  void touch(Parameter& parameter);
  uint64_t id() const noexcept { return id_; }

 private:
  uint64_t id_;
  GradientCapture* outer_;
  std::vector<Touched> touched_;
};

// The parameters as a launch leaves them.
void launched(const std::vector<GradientCapture::Touched>& touched);

}  // namespace te_fl::nn::detail
