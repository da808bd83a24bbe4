#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "te_fl/nn/files/safetensors.hpp"

// The files of a checkpoint whose parameters are sharded over ranks, and the assembly of one rank's
// parts from them.
namespace te_fl::nn::detail {

// The file of a rank: PATH.R-of-N; PATH if there is one rank.
std::string shard_path(const std::string& path, int rank, int size);

// Metadata with the position of each sharded parameter in the complete parameter:
// "te_fl.shard.NAME" = extents of the complete parameter; begin; pairs of rows, as in
// "64,32;0,0;16,8,48,8". INVALID_ARGUMENT for block-scaled FP8 parameters.
Result<Metadata> list_places(const std::vector<NamedParameter>& parameters);

// Loads a checkpoint that any number of ranks has written. Returns this rank's shards of
// `parameters`, and the optimizer tensors of the same names. `optimizer`: also reads the files of
// optimizer_files.hpp. The metadata come from the file of the same rank and number of ranks, or
// else from the first file. NOT_FOUND, DATA_LOSS or INVALID_ARGUMENT names the file or tensor and
// the problem.
Result<SafetensorsFile> load_shards(const std::string& path, int rank, int size,
                                    const std::vector<NamedParameter>& parameters, bool optimizer);

}  // namespace te_fl::nn::detail
