#pragma once

#include <cstdint>
#include <string>

namespace te_fl::nn {

// Rows of a weight and its bias that form separate parameters.
struct ParameterPart {
  std::string name;  // "query" gives query_weight and query_bias
  int64_t rows = 0;
};

}  // namespace te_fl::nn
