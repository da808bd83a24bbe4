// Finds the fastest of several implementations of one computation on a GPU under load. Plain C++,
// so tests run without a GPU.
#pragma once

#include <cstddef>
#include <functional>

namespace te_fl::cuda {

struct Contest {
  // Returns the microseconds per run over `runs` consecutive runs of candidate i; negative if it
  // does not run.
  std::function<double(size_t i, int runs)> time;
  // Returns true if candidate i computes the same result as candidate 0. Called only for the
  // candidates of the last stage.
  std::function<bool(size_t i)> agrees;
};

struct Winner {
  size_t index = 0;
  double us = -1, first_us = -1;  // medians of the last rounds: of the winner and of candidate 0
  int timed = 0, different = 0;   // number that ran; number that did not agree
};

// Times every candidate briefly, then runs rounds with fewer and fewer candidates in a
// pseudo-random order that is the same in every process. Returns the candidate with the smallest
// median time in the last rounds. Candidate 0 takes part in the last rounds. If no candidate runs,
// `timed` and `index` are 0.
Winner select_fastest(size_t candidates, const Contest& contest);

}  // namespace te_fl::cuda
