// The number of rounds of a test that draws calls at random.
#pragma once

#include <cstdlib>

#include "support/sanitizers.hpp"

namespace te_fl::testing {

// `all`, or an eighth of it under a sanitizer: the build without one compares the results of all
// rounds, and what a sanitizer finds in such code takes fewer. TEST_ALL_ROUNDS, which tools/test.sh
// --long sets, keeps them all.
inline int rounds(int all) {
  const bool fewer = (TE_FL_ASAN || TE_FL_TSAN) && std::getenv("TEST_ALL_ROUNDS") == nullptr;
  return fewer ? all / 8 : all;
}

}  // namespace te_fl::testing
