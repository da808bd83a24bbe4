#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "te_fl/nn/files/safetensors.hpp"

// The files of a checkpoint whose parameters ranks divide, and the parts of one rank put together
// from them.
namespace te_fl::nn::detail {

// PATH.R-of-N; PATH of one rank.
std::string shard_path(const std::string& path, int rank, int size);

// For the metadata, where each divided parameter lies in its whole: "te_fl.shard.NAME" = extents of
// the whole, begin, and pairs of rows, as "64,32;0,0;16,8,48,8". INVALID_ARGUMENT for codes that
// are scaled by blocks.
Result<Metadata> places_of(const std::vector<NamedParameter>& parameters);

// The checkpoint at `path`, of any number of ranks, as this rank's parameters, and an optimizer's
// tensors of the same names, lie in their wholes; `optimizer`: with the files that
// optimizer_files.hpp is about. The metadata are those of the file of the same
// rank and number, else of the first one. NOT_FOUND, DATA_LOSS or INVALID_ARGUMENT names the file
// or the tensor and what is wrong.
Result<SafetensorsFile> load_shards(const std::string& path, int rank, int size,
                                    const std::vector<NamedParameter>& parameters, bool optimizer);

}  // namespace te_fl::nn::detail
