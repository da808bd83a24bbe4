#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "te_fl/nn/autograd/parameter.hpp"

// The positions of the ranks' tensors in their wholes, for one or two dimensions.
namespace te_fl::nn::detail {

// Formats extents of the whole; begin; pairs of rows, as in "64,32;0,0;16,8,48,8".
std::string place_text(const Shard& shard);
// Parses place_text(); false for any other text.
bool parse_place(std::string_view text, Shard& shard);
// The place of a tensor that is not sharded.
Shard place_of_whole(std::span<const int64_t> shape);
// Copies a part to or from its place in the whole. Both are compact in host memory. False if the
// place does not fit them.
bool copy_part(const Tensor& whole, const Tensor& part, const Shard& shard, bool to_whole);
// True if two parts of one whole overlap. Their shapes and places must fit the whole.
bool overlap(std::span<const int64_t> a_shape, const Shard& a, std::span<const int64_t> b_shape,
             const Shard& b);

}  // namespace te_fl::nn::detail
