#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "te_fl/nn/modules/module.hpp"
#include "te_fl/nn/modules/tensor_parallel.hpp"
#include "te_fl/nn/optim/optimizer.hpp"

// The safetensors file format: a little-endian header length of 8 bytes, a JSON header, the
// tensors' bytes.
namespace te_fl::nn {

using Metadata = std::map<std::string, std::string>;

struct SafetensorsEntry {
  std::string name;
  DType dtype = DType::kF32;
  Shape shape;
  // The data occupies the bytes [begin, end) of the data section.
  uint64_t begin = 0;
  uint64_t end = 0;
};

struct SafetensorsHeader {
  Metadata metadata;
  std::vector<SafetensorsEntry> entries;  // in the order of their data
  uint64_t data_offset = 0;               // where the data section starts in the file
};

// Parses and checks the header of a file of `file_size` bytes. `prefix` holds the first bytes of
// the file, at least the whole header. DATA_LOSS names `source`, the tensor and the problem:
// truncated, header too long or not JSON, unknown dtype, negative or overflowing shape, data
// offsets out of range, overlapping, with gaps or not matching the shape.
TE_FL_API Result<SafetensorsHeader> parse_safetensors_header(std::span<const std::byte> prefix,
                                                             uint64_t file_size,
                                                             std::string_view source);

struct SafetensorsFile {
  Metadata metadata;
  std::vector<NamedTensor> tensors;  // on the host
};

// Reads a whole file. Checks everything before it returns anything.
TE_FL_API Result<SafetensorsFile> load_safetensors(const std::string& path);
// Writes a file next to `path`, syncs it, and renames it to `path` (if that is a symbolic link, to
// the link's target). Tensors must be unquantised; any device and any strides. INVALID_ARGUMENT for
// a name that is empty, duplicate or not UTF-8; FAILED_PRECONDITION if the file cannot be written,
// or if `path` is a folder, a device or a pipe. After an error the old file is unchanged.
TE_FL_API Status save_safetensors(const std::string& path, const std::vector<NamedTensor>& tensors,
                                  const Metadata& metadata = {});

// Saves a module with its FP8 state, optionally the state of an optimizer, and the current
// context's RNG state, so that training can continue bit for bit. `metadata` belongs to the caller;
// keys beginning with "te_fl." are reserved for te-fl. Reads the tensors on the current context's
// stream, and load_checkpoint() writes them on it: call both in the training's ContextScope, or
// after a Stream::synchronize() of its stream.
//
// If the optimizer's state is sharded among ranks (AdamOptions::zero), all these ranks call this
// function: rank R of N writes its shard to PATH.optimizer.R-of-N, and rank 0 also writes PATH. The
// checkpoint is complete when all ranks have returned. Any number of ranks, with ZeRO or without,
// can load these files; every rank must be able to read all of them.
TE_FL_API Status save_checkpoint(const std::string& path, const Module& module,
                                 const Optimizer* optimizer = nullptr,
                                 const Metadata& metadata = {});
// Restores what save_checkpoint wrote and returns the metadata. All or nothing: every tensor is
// checked first. If `optimizer` is null, optimizer state in the checkpoint is ignored.
TE_FL_API Result<Metadata> load_checkpoint(const std::string& path, Module& module,
                                           Optimizer* optimizer = nullptr);

// Versions for a module that is sharded among ranks (tensor parallelism). Rank R of N saves its own
// file PATH.R-of-N, which records the position of each shard; a single rank saves PATH. Any number
// of ranks that divides the sizes can load the files of any other number: each rank reads its
// shards from the files of all ranks and must be able to read all of them. These functions are not
// collectives; a checkpoint is complete when all ranks have returned. Replicated state (FP8 state,
// parameters that are not sharded) is loaded from the first file. TensorParallel::random, if any,
// is restored only with the same number of ranks; otherwise it keeps the program's state.
//
// FP8-only parameters have one scale per shard. If the shards that a loading rank combines have
// equal scales, the rank loads their FP8 data bit for bit. Otherwise it dequantises them and
// quantises the result with the scale of the largest value. INVALID_ARGUMENT for sharded parameters
// that are borrowed as FP8 tensors with block scaling. FAILED_PRECONDITION if the path has files of
// two different numbers of ranks.
TE_FL_API Status save_checkpoint(const std::string& path, const TensorParallel& parallel,
                                 const Module& module, const Optimizer* optimizer = nullptr,
                                 const Metadata& metadata = {});
TE_FL_API Result<Metadata> load_checkpoint(const std::string& path, const TensorParallel& parallel,
                                           Module& module, Optimizer* optimizer = nullptr);

}  // namespace te_fl::nn
