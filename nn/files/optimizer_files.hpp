#pragma once

#include <string>

#include "te_fl/nn/files/safetensors.hpp"

// The files with an optimizer state that is sharded over ranks (AdamOptions::zero), stored beside
// the module's checkpoint.
namespace te_fl::nn::detail {

// Metadata key, used in a checkpoint and in each file of optimizer state.
inline constexpr const char* kOptimizerSteps = "te_fl.optimizer_steps";
// Metadata key of a checkpoint: the number of files that contain its optimizer state. Absent if the
// checkpoint itself contains the state.
inline constexpr const char* kOptimizerParts = "te_fl.optimizer_parts";

// Writes this rank's part to PATH.optimizer.R-of-N. For each parameter the metadata have
// "te_fl.part.NAME" = the extents of the complete parameter; the index of the first element of the
// part, and of the one after the last, as in "64,32;1024,2048".
Status save_optimizer_part(const std::string& path, const Optimizer& optimizer);
// Assembles the optimizer state from these files and adds it to the checkpoint `file`, which was
// read from `path`. Does nothing if the checkpoint contains the state. NOT_FOUND or DATA_LOSS names
// the file and the problem.
Status join_optimizer(const std::string& path, SafetensorsFile& file);

}  // namespace te_fl::nn::detail
