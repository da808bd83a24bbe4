#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "te_fl/export.hpp"
#include "te_fl/nn/safetensors.hpp"

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

// Writes the tensors into `folder`, which must be there: STEM.safetensors if they fit into one
// file, else as many as it takes and then the index, so that whoever reads while it is written has
// the old index or the new one; an index that one file replaces is removed. The conditions are
// save_safetensors()'s.
TE_FL_API Status save_sharded(const std::string& folder, const std::vector<NamedTensor>& tensors,
                              const ShardedOptions& options = {});

}  // namespace te_fl::nn
