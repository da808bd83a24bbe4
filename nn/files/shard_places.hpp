#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "te_fl/nn/autograd/parameter.hpp"

// The places that tensors of ranks have in their wholes, of one or two dimensions.
namespace te_fl::nn::detail {

// Extents of the whole, begin, and pairs of rows, as "64,32;0,0;16,8,48,8".
std::string place_text(const Shard& shard);
// Reads place_text(); false if it is something else.
bool parse_place(std::string_view text, Shard& shard);
// The place of a tensor that is its own whole.
Shard place_of_whole(std::span<const int64_t> shape);
// Copies between a tensor and its place in the whole, both compact on the host. False if the place
// does not fit them.
bool copy_part(const Tensor& whole, const Tensor& part, const Shard& shard, bool to_whole);
// True if two parts of one whole have an element in common; their shapes and places fit it.
bool overlap(std::span<const int64_t> a_shape, const Shard& a, std::span<const int64_t> b_shape,
             const Shard& b);

}  // namespace te_fl::nn::detail
