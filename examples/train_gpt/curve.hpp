#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace train_gpt {

// The losses of a run: one per training step, and the loss of the held-out text at the end.
struct Curve {
  std::vector<double> training;  // nats per byte
  double held_out = 0;
  std::string title;
};

// Returns the means of at most `count` groups of neighbouring values, as equal in size as possible;
// empty if there are no values.
std::vector<double> averaged(const std::vector<double>& values, size_t count);
// Returns a chart for a terminal: ASCII lines, 72 columns wide. Empty without training steps.
std::string chart(const Curve& curve);
// Returns the chart as an SVG document, legible on light and dark backgrounds.
std::string svg(const Curve& curve);

}  // namespace train_gpt
