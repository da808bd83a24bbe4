#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "te_fl/export.hpp"
#include "te_fl/nn/files/safetensors.hpp"

// Models in several safetensors files with an index, as Hugging Face's hub has them:
// model-00001-of-00003.safetensors, ..., and model.safetensors.index.json, a JSON object whose
// "weight_map" has each tensor's file name.
namespace te_fl::nn {

// As load_safetensors(), but the tensors are views of the file, mapped: pages are read when they
// are first touched, and shared with other processes. Writing to a tensor does not reach the file.
// One whose data is not aligned to its elements is copied. The file must not become shorter while a
// tensor of it lives: reading what is gone ends the process (SIGBUS).
TE_FL_API Result<SafetensorsFile> map_safetensors(const std::string& path);

// A model's tensors, mapped: of a .safetensors file; of an index (.json) and the files beside it
// that it names; or of a folder that has one of them (the index first) under the name `stem`. The
// metadata are the first file's. NOT_FOUND, INVALID_ARGUMENT or DATA_LOSS names the file, the
// tensor and what is wrong: a file that is not there, or a name with a folder in it; a tensor that
// the index does not name, or names in another file.
TE_FL_API Result<SafetensorsFile> load_sharded(const std::string& path,
                                               const std::string& stem = "model");

struct ShardedOptions {
  uint64_t max_shard_bytes = 5'000'000'000;  // of tensor data; a larger tensor has its own file
  std::string stem = "model";
  Metadata metadata = {{"format", "pt"}};  // of each file; readers of the hub want the format
};

// Writes the tensors into `folder`, which must be there, in place of the model of that stem:
// STEM.safetensors if they fit into one file, else as many as it takes and then the index of them.
// The files get names that the model of before does not use (STEM-00001-of-00003.safetensors, or
// STEM.2-00001-of-...), so that a save that fails, or dies, leaves that model as it was; one that
// fails also removes what it has written. What readers would still find of the old model goes last:
// its single file or its index, then the shards that its index names. FAILED_PRECONDITION if the
// first of these cannot be removed; a shard that cannot be is a warning. The other conditions are
// save_safetensors()'s. One process at a time may save to a folder.
TE_FL_API Status save_sharded(const std::string& folder, const std::vector<NamedTensor>& tensors,
                              const ShardedOptions& options = {});

}  // namespace te_fl::nn
