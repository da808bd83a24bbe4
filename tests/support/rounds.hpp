// Number of rounds for tests with random calls.
#pragma once

#include <cstdlib>

#include "support/sanitizers.hpp"

namespace te_fl::testing {

// Returns `all`, or an eighth of it under a sanitizer: the plain build compares the results of all
// rounds, and a sanitizer finds its kind of error in fewer. TEST_ALL_ROUNDS, which tools/test.sh
// --long sets, keeps all rounds.
inline int rounds(int all) {
  const bool fewer = (TE_FL_ASAN || TE_FL_TSAN) && std::getenv("TEST_ALL_ROUNDS") == nullptr;
  return fewer ? all / 8 : all;
}

}  // namespace te_fl::testing
