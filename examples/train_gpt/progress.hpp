#pragma once

#include <chrono>
#include <cstdint>

namespace train_gpt {

// Tells on standard output how far the training is: a line every so many steps and, on a terminal,
// one in between that is rewritten in place.
class Progress {
 public:
  // tokens_per_step: bytes that one step learns from; every: steps between the lines that stay.
  Progress(int64_t steps, double tokens_per_step, int64_t every);
  // Step `done` (from 1) has ended with this loss.
  void step(int64_t done, double loss);
  // Since the construction.
  double seconds() const;

 private:
  int64_t steps_, every_;
  double tokens_per_step_;
  bool terminal_;
  std::chrono::steady_clock::time_point start_;
  double rewritten_at_ = -1;  // seconds()
};

// True if standard output is a terminal on which a line can be rewritten.
bool on_terminal();

}  // namespace train_gpt
