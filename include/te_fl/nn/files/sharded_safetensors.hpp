#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "te_fl/export.hpp"
#include "te_fl/nn/files/safetensors.hpp"

// Models in several safetensors files with an index, as on Hugging Face's hub:
// model-00001-of-00003.safetensors, ..., and model.safetensors.index.json, a JSON object whose
// "weight_map" gives each tensor's file name.
namespace te_fl::nn {

// Like load_safetensors(), but the tensors are views of a memory mapping of the file. Pages are
// read on first access and shared with other processes. Writes to a tensor do not reach the file. A
// tensor whose data is not aligned to its element size is copied. The file must not be truncated
// while one of its tensors lives: reading the missing part kills the process (SIGBUS).
TE_FL_API Result<SafetensorsFile> map_safetensors(const std::string& path);

// Maps a model's tensors. `path` is a .safetensors file; or an index (.json), whose files lie next
// to it; or a folder that contains an index or a file with the name `stem` (the index is
// preferred). The metadata is that of the first file. NOT_FOUND, INVALID_ARGUMENT or DATA_LOSS
// names the file, the tensor and the problem: a missing file, a file name with a folder in it, a
// tensor that the index does not list or lists under another file.
TE_FL_API Result<SafetensorsFile> load_sharded(const std::string& path,
                                               const std::string& stem = "model");

struct ShardedOptions {
  // bytes of tensor data; a larger tensor gets its own file
  uint64_t max_shard_bytes = 5'000'000'000;
  std::string stem = "model";
  // written to each file; readers of the hub require "format"
  Metadata metadata = {{"format", "pt"}};
};

// Saves the tensors in `folder`, which must exist, replacing the model with this stem. Writes
// STEM.safetensors if the tensors fit into one file, otherwise several files and then their index.
// The new files have names that the old model does not use (STEM-00001-of-00003.safetensors, or
// STEM.2-00001-of-...), so that the old model survives a save that fails or crashes; a save that
// fails also removes the files that it has written.
//
// The old model is removed last: its single file or its index, then the shards that its index
// lists. FAILED_PRECONDITION if the single file or the index cannot be removed; a shard that cannot
// be removed is a warning. Other conditions are those of save_safetensors(). Only one process at a
// time may save to a folder.
TE_FL_API Status save_sharded(const std::string& folder, const std::vector<NamedTensor>& tensors,
                              const ShardedOptions& options = {});

}  // namespace te_fl::nn
