#pragma once

#include <string>

#include "te_fl/nn/files/safetensors.hpp"

// The files of an optimizer's state that ranks divide (AdamOptions::zero), beside the checkpoint of
// the module.
namespace te_fl::nn::detail {

// Metadata of a checkpoint, and of each of these files.
inline constexpr const char* kOptimizerSteps = "te_fl.optimizer_steps";
// Metadata of a checkpoint: the number of files that have its optimizer's state; absent: it has
// that itself.
inline constexpr const char* kOptimizerParts = "te_fl.optimizer_parts";

// Writes this rank's part to PATH.optimizer.R-of-N. Its metadata have for each parameter
// "te_fl.part.NAME" = the extents of the whole, and the first element and the one after the last,
// as "64,32;1024,2048".
Status save_optimizer_part(const std::string& path, const Optimizer& optimizer);
// Adds the whole state from these files to the checkpoint `file` that was read from `path`; nothing
// if it has the state itself. NOT_FOUND or DATA_LOSS names the file and what is wrong.
Status join_optimizer(const std::string& path, SafetensorsFile& file);

}  // namespace te_fl::nn::detail
