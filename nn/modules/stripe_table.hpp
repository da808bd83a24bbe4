#pragma once

#include <cstdint>

#include "te_fl/device.hpp"
#include "te_fl/dtype.hpp"
#include "te_fl/nn/modules/stripes.hpp"
#include "te_fl/tensor.hpp"

// The measured file of stripes; docs/ranks.md has its form.
namespace te_fl::nn::detail {

// A product [rows, in] x [in, out] whose result the ranks sum, each getting its rows.
struct SummedProduct {
  int ranks = 1;
  const Tensor& input;  // [rows, in]: quantised or not
  int64_t out = 0;
  DType output = DType::kF32;
};

// The number of stripes of output features that the file gives the product; 1 if it has none, or
// there is no file, which costs an atomic load. It divides `out`. Errors: stripes_in_words().
Result<int> stripes_of(const SummedProduct& product);

}  // namespace te_fl::nn::detail
