#pragma once

#include <cstdint>

#include "te_fl/device.hpp"
#include "te_fl/dtype.hpp"
#include "te_fl/nn/modules/stripes.hpp"
#include "te_fl/tensor.hpp"

// The file with measured numbers of stripes. docs/ranks.md describes its format.
namespace te_fl::nn::detail {

// A product [rows, in] x [in, out] whose results are reduce-scattered over the ranks.
struct SummedProduct {
  int ranks = 1;
  const Tensor& input;  // [rows, in], quantised or not
  int64_t out = 0;
  DType output = DType::kF32;
};

// The number of stripes of output features for the product, from the file; it divides `out`. 1 if
// the file has no entry or there is no file, in which case the call costs one atomic load. Errors:
// as stripes_in_words().
Result<int> stripes_of(const SummedProduct& product);

}  // namespace te_fl::nn::detail
