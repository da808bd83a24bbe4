#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "te_fl/nn/autograd/parameter.hpp"

// The positions of the ranks' shards in the complete tensors, for one or two dimensions.
namespace te_fl::nn::detail {

// Formats a shard as "64,32;0,0;16,8,48,8": the extents of the complete tensor; the first index of
// the shard in each dimension; pairs of (first row, number of rows).
std::string place_text(const Shard& shard);
// Parses place_text(); false for any other text.
bool parse_place(std::string_view text, Shard& shard);
// The place of a tensor that is not sharded.
Shard place_of_whole(std::span<const int64_t> shape);
// Copies a shard to or from its place in the complete tensor. Both tensors are compact in host
// memory. False if the place does not fit them.
bool copy_part(const Tensor& whole, const Tensor& part, const Shard& shard, bool to_whole);
// True if two shards of one tensor overlap. Their shapes and places must fit the complete tensor.
bool overlap(std::span<const int64_t> a_shape, const Shard& a, std::span<const int64_t> b_shape,
             const Shard& b);

}  // namespace te_fl::nn::detail
