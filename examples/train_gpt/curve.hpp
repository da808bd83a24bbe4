#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace train_gpt {

// The losses of a run: one per training step, and that of the held-out text at its end.
struct Curve {
  std::vector<double> training;  // nats per byte
  double held_out = 0;
  std::string title;
};

// The means of at most `count` runs of neighbouring values, as even as they can be; empty of none.
std::vector<double> averaged(const std::vector<double>& values, size_t count);
// A chart for a terminal: lines of ASCII, 72 columns wide. Empty without training steps.
std::string chart(const Curve& curve);
// Writes it as an SVG document, legible on light and dark grounds.
std::string svg(const Curve& curve);

}  // namespace train_gpt
