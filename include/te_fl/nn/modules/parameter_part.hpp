#pragma once

#include <cstdint>
#include <string>

namespace te_fl::nn {

// Rows of a weight and bias that are parameters of their own.
struct ParameterPart {
  std::string name;  // "query": query_weight, query_bias
  int64_t rows = 0;
};

}  // namespace te_fl::nn
