#pragma once

#include <string>

#include "te_fl/plugin.h"

namespace te_fl::testing {

// The status that an op returned, and its error text.
struct Outcome {
  te_fl_status status = TE_FL_OK;
  std::string text;
};

}  // namespace te_fl::testing
