// Finds which of many ways of one computation is the fastest on a chip under load. Plain C++, so
// that it can be tested where there is no GPU.
#pragma once

#include <cstddef>
#include <functional>

namespace te_fl::cuda {

struct Contest {
  // Microseconds per run of `runs` runs of candidate i in a row; negative if it does not run.
  std::function<double(size_t i, int runs)> time;
  // True if candidate i computes what candidate 0 does. Asked of those that come near to winning.
  std::function<bool(size_t i)> agrees;
};

struct Winner {
  size_t index = 0;
  double us = -1, first_us = -1;  // medians of the last rounds, of the winner and of candidate 0
  int timed = 0, different = 0;   // candidates that ran; those that did not agree
};

// A look at every candidate, then rounds among ever fewer of them, in which they take turns in an
// order that is drawn (the same in every process); the smallest median of the last rounds wins.
// Candidate 0 is in the last rounds. If no candidate runs, `timed` is 0 and the index too.
Winner select_fastest(size_t candidates, const Contest& contest);

}  // namespace te_fl::cuda
