#pragma once

#include <vector>

#include "sampled.hpp"

namespace te_fl::conformance::huge {

struct Case {
  const char* op;
  void (*run)(Run&);
};
const std::vector<Case>& cases();

}  // namespace te_fl::conformance::huge
