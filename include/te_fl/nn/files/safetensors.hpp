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

// The safetensors file format: 8 bytes little-endian header length, a JSON header, the tensors'
// bytes.
namespace te_fl::nn {

using Metadata = std::map<std::string, std::string>;

struct SafetensorsEntry {
  std::string name;
  DType dtype = DType::kF32;
  Shape shape;
  uint64_t begin = 0;  // bytes, within the data section
  uint64_t end = 0;
};

struct SafetensorsHeader {
  Metadata metadata;
  std::vector<SafetensorsEntry> entries;  // in the order of their data
  uint64_t data_offset = 0;               // where the data section starts in the file
};

// Reads and checks the header of a file of `file_size` bytes whose first bytes are `prefix` (at
// least the header). DATA_LOSS names `source`, the tensor and what is wrong: truncated, header too
// long or not JSON, unknown dtype, negative or overflowing shape, offsets out of range,
// overlapping, leaving gaps or not matching the shape.
TE_FL_API Result<SafetensorsHeader> parse_safetensors_header(std::span<const std::byte> prefix,
                                                             uint64_t file_size,
                                                             std::string_view source);

struct SafetensorsFile {
  Metadata metadata;
  std::vector<NamedTensor> tensors;  // on the host
};

// Reads a whole file; everything is checked before anything is returned.
TE_FL_API Result<SafetensorsFile> load_safetensors(const std::string& path);
// Writes a file beside `path`, syncs it, and renames it over path (over what it links to, if it is
// a link). Tensors must be unquantised; any device, any strides. INVALID_ARGUMENT for a name that
// is empty, given twice or not UTF-8; FAILED_PRECONDITION if the file cannot be written, or path is
// a folder, a device or a pipe. After an error the old file is as it was.
TE_FL_API Status save_safetensors(const std::string& path, const std::vector<NamedTensor>& tensors,
                                  const Metadata& metadata = {});

// A module with its FP8 state, optionally an optimizer's state, and the current context's random
// position, so that training continues bit for bit. `metadata` is the caller's own; keys beginning
// with "te_fl." are te-fl's. Reads what the current context's stream has written, as
// load_checkpoint() writes in its order: call them in the training's ContextScope, or after its
// stream was waited for (Stream::synchronize).
//
// Ranks that divide the optimizer's state (AdamOptions::zero) all call it: rank R of N writes its
// part to PATH.optimizer.R-of-N, and the first one PATH as well. Saving is complete when all ranks
// have returned. Any number of ranks loads these files, divided or not, and must see all of them.
TE_FL_API Status save_checkpoint(const std::string& path, const Module& module,
                                 const Optimizer* optimizer = nullptr,
                                 const Metadata& metadata = {});
// Restores what save_checkpoint wrote and returns the metadata. All or nothing: every tensor is
// checked first. With optimizer null, a checkpoint's optimizer state is passed over.
TE_FL_API Result<Metadata> load_checkpoint(const std::string& path, Module& module,
                                           Optimizer* optimizer = nullptr);

// As these two, of a module that ranks divide: each rank has a file of its own, PATH.R-of-N for
// rank R of N, and says in it where its parts lie; one rank has PATH. What was saved by one number
// of ranks is loaded by any other that divides the sizes: the parts are read from the files of all,
// which every rank must see. Without collectives; saving is complete when all ranks have returned.
// Parts that every rank has (FP8 state, undivided parameters) come from the first file.
// TensorParallel::random, where there is one, continues with the same number of ranks; with another
// it stays where the program has set it.
// Parameters of FP8 codes alone have a scale in each part. Where the parts that a loading rank puts
// together have the same one, it gets their codes, bit for bit; else their values, which it
// quantises again with the scale of the largest. INVALID_ARGUMENT for divided parameters lent as
// codes that are scaled by blocks, FAILED_PRECONDITION where files of two numbers of ranks lie at
// the path.
TE_FL_API Status save_checkpoint(const std::string& path, const TensorParallel& parallel,
                                 const Module& module, const Optimizer* optimizer = nullptr,
                                 const Metadata& metadata = {});
TE_FL_API Result<Metadata> load_checkpoint(const std::string& path, const TensorParallel& parallel,
                                           Module& module, Optimizer* optimizer = nullptr);

}  // namespace te_fl::nn
