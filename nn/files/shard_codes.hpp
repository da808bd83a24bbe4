#pragma once

#include <string>
#include <vector>

#include "te_fl/nn/autograd/parameter.hpp"

// Sharded parameters that exist in FP8 only, where each rank's part has its own scale.
namespace te_fl::nn::detail {

// The part of an FP8-only parameter in one file, in host memory.
struct CodesPart {
  Tensor codes;      // FP8, compact
  Tensor scale_inv;  // F32 [1]
  Tensor amax;       // F32 [1], or undefined
  Shard place;       // matches the shape of the codes
};

// Assembles the shard at `place` with shape `shape` from the parts in all files. If the parts that
// it overlaps have the same scale, returns the FP8 tensor NAME with NAME.scale_inv and NAME.amax.
// Otherwise returns NAME alone as F32, which is quantised again when it is loaded. NAME.amax is
// absent if an overlapped part has elements outside of `place`, since the amax of the shard is then
// unknown. INVALID_ARGUMENT if `place` does not fit the complete parameter.
Result<std::vector<NamedTensor>> codes_of_part(const std::string& name,
                                               const std::vector<CodesPart>& files,
                                               std::span<const int64_t> shape, const Shard& place);

}  // namespace te_fl::nn::detail
