#include "nn/files/optimizer_files.hpp"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <functional>
#include <map>
#include <numeric>
#include <utility>

#include "nn/files/place_text.hpp"
#include "te_fl/nn/files/sharded_safetensors.hpp"

namespace te_fl::nn::detail {
namespace {

constexpr const char* kPart = "te_fl.part.";

std::string part_path(const std::string& path, int rank, int size) {
  return path + ".optimizer." + std::to_string(rank) + "-of-" + std::to_string(size);
}

// A complete tensor of the optimizer state, assembled from the ranks' parts in rank order.
struct Whole {
  Tensor tensor;
  int64_t filled = 0;  // number of leading elements that are complete
};

// Reads from the file's metadata which part of the complete tensor the file contains.
bool parse_part(const Metadata& metadata, const std::string& parameter, StatePart& part) {
  const auto found = metadata.find(kPart + parameter);
  if (found == metadata.end()) return false;
  const std::string_view text = found->second;
  const size_t middle = text.find(';');
  Shape range;
  if (middle == text.npos || !parse_list(text.substr(0, middle), part.shape) ||
      !parse_list(text.substr(middle + 1), range) || range.size() != 2) {
    return false;
  }
  part.begin = range[0];
  part.end = range[1];
  return true;
}

Status add_part(std::map<std::string, Whole>& wholes, const NamedTensor& t,
                const SafetensorsFile& file, const std::string& path) {
  const auto wrong = [&](const std::string& what) {
    return Status(StatusCode::kDataLoss, path + ": the place of tensor " + t.name + " " + what);
  };
  StatePart part;
  if (!parse_part(file.metadata, parameter_name(t.name), part)) {
    return wrong("in its whole is not there or not readable");
  }
  Whole& whole = wholes[t.name];
  if (!whole.tensor.defined()) {
    TE_FL_ASSIGN_OR_RETURN(whole.tensor, Tensor::empty(part.shape, t.tensor.dtype()));
  }
  const bool fits = part.begin == whole.filled && part.end <= whole.tensor.numel() &&
                    part.end - part.begin == t.tensor.numel() &&
                    t.tensor.dtype() == whole.tensor.dtype() &&
                    std::ranges::equal(part.shape, whole.tensor.shape());
  if (!fits) return wrong("does not fit the tensor or the files before");
  std::memcpy(whole.tensor.data<char>() + bytes_for(whole.tensor.dtype(), part.begin),
              t.tensor.raw_data(),
              static_cast<size_t>(bytes_for(t.tensor.dtype(), t.tensor.numel())));
  whole.filled = part.end;
  return {};
}

Result<SafetensorsFile> open_part(const std::string& path, const std::string& part,
                                  const Metadata& metadata) {
  TE_FL_ASSIGN_OR_RETURN(const SafetensorsFile file, map_safetensors(part));
  const auto own = file.metadata.find(kOptimizerSteps), wanted = metadata.find(kOptimizerSteps);
  if (own != file.metadata.end() && wanted != metadata.end() && own->second == wanted->second) {
    return file;
  }
  return Status(StatusCode::kDataLoss,
                part + ": it is of another step than " + path + "; they are not of one save");
}

}  // namespace

Status save_optimizer_part(const std::string& path, const Optimizer& optimizer) {
  Metadata metadata = {{kOptimizerSteps, std::to_string(optimizer.steps())}};
  for (const StatePart& part : optimizer.state_parts()) {
    if (part.begin == part.end) continue;
    metadata[kPart + part.name] =
        list_text(part.shape) + ";" + std::to_string(part.begin) + "," + std::to_string(part.end);
  }
  return save_safetensors(part_path(path, optimizer.state_rank(), optimizer.state_ranks()),
                          optimizer.state(), metadata);
}

Status join_optimizer(const std::string& path, SafetensorsFile& file) {
  const auto parts = file.metadata.find(kOptimizerParts);
  if (parts == file.metadata.end()) return {};
  int size = 0;
  const std::string& text = parts->second;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), size);
  if (error != std::errc() || end != text.data() + text.size() || size < 1) {
    return Status(StatusCode::kDataLoss, path + ": metadata \"" + kOptimizerParts + "\" is \"" +
                                             text + "\"; it must be a number of files");
  }
  std::map<std::string, Whole> wholes;
  for (int rank = 0; rank < size; ++rank) {
    const std::string name = part_path(path, rank, size);
    TE_FL_ASSIGN_OR_RETURN(const SafetensorsFile part, open_part(path, name, file.metadata));
    for (const NamedTensor& t : part.tensors) {
      TE_FL_RETURN_IF_ERROR(add_part(wholes, t, part, name));
    }
  }
  for (auto& [name, whole] : wholes) {
    if (whole.filled != whole.tensor.numel()) {
      return Status(StatusCode::kDataLoss, path + ": the files of the optimizer's state have " +
                                               std::to_string(whole.filled) + " of the " +
                                               std::to_string(whole.tensor.numel()) +
                                               " elements of tensor " + name);
    }
    file.tensors.push_back({name, std::move(whole.tensor)});
  }
  return {};
}

}  // namespace te_fl::nn::detail
