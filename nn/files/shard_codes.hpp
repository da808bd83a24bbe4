#pragma once

#include <string>
#include <vector>

#include "te_fl/nn/autograd/parameter.hpp"

// Parameters of FP8 codes alone whose parts have scales of their own.
namespace te_fl::nn::detail {

// One file's part of such a parameter, on the host.
struct CodesPart {
  Tensor codes;      // FP8, compact
  Tensor scale_inv;  // F32 [1]
  Tensor amax;       // F32 [1], or undefined
  Shard place;       // fits the codes
};

// The tensors NAME, NAME.scale_inv and NAME.amax of `part`, of which the parts of all files have
// the values. As codes where the parts that it meets have one scale; else NAME alone, as F32, which
// loading quantises again. Without an amax where it is not known: where a part that it meets has
// elements outside of it.
// INVALID_ARGUMENT if the parts' whole has no such part.
Result<std::vector<NamedTensor>> codes_of_part(const std::string& name,
                                               const std::vector<CodesPart>& files,
                                               std::span<const int64_t> shape, const Shard& place);

}  // namespace te_fl::nn::detail
