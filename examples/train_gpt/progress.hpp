#pragma once

#include <chrono>
#include <cstdint>

namespace train_gpt {

// Reports the training's progress on standard output: one line every `every` steps and, on a
// terminal, a line between them that is overwritten in place.
class Progress {
 public:
  // tokens_per_step: bytes per training step. every: number of steps between permanent lines.
  Progress(int64_t steps, double tokens_per_step, int64_t every);
  // Reports that step `done`, counted from 1, has ended with this loss.
  void step(int64_t done, double loss);
  // Returns the seconds since construction.
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
