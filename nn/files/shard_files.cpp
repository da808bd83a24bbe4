#include "nn/files/shard_files.hpp"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <iterator>
#include <map>
#include <set>
#include <utility>

#include "nn/files/optimizer_files.hpp"
#include "nn/files/place_text.hpp"
#include "nn/files/shard_codes.hpp"
#include "nn/files/shard_places.hpp"
#include "te_fl/nn/files/sharded_safetensors.hpp"

namespace te_fl::nn::detail {
namespace {

constexpr std::string_view kPrefix = "te_fl.shard.";

struct Source {
  std::string path;
  SafetensorsFile file;
  std::map<std::string, Tensor> tensors;
};

// The number of ranks whose files exist at the path.
Result<int> ranks_at(const std::string& path) {
  const std::filesystem::path whole(path);
  const std::filesystem::path folder = whole.has_parent_path() ? whole.parent_path() : ".";
  const std::string first = whole.filename().string() + ".0-of-";
  std::set<int> found;
  std::error_code error;
  if (std::filesystem::exists(whole, error)) found.insert(1);
  for (auto entry = std::filesystem::directory_iterator(folder, error);
       !error && entry != std::filesystem::directory_iterator(); entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    int count = 0;
    if (!name.starts_with(first)) continue;
    const char *begin = name.data() + first.size(), *end = name.data() + name.size();
    const auto [at, wrong] = std::from_chars(begin, end, count);
    if (wrong == std::errc() && at == end && count > 1) found.insert(count);
  }
  if (found.empty()) {
    return Status(StatusCode::kNotFound,
                  path + ": neither it nor " + path + ".0-of-N is there; name a checkpoint");
  }
  if (found.size() > 1) {
    return failed_precondition(path + ": checkpoints of " + std::to_string(*found.begin()) +
                               " and of " + std::to_string(*found.rbegin()) +
                               " ranks lie there; remove the older one");
  }
  return *found.begin();
}

Result<std::vector<Source>> open_all(const std::string& path, bool optimizer) {
  TE_FL_ASSIGN_OR_RETURN(const int count, ranks_at(path));
  std::vector<Source> sources;
  for (int rank = 0; rank < count; ++rank) {
    Source source{shard_path(path, rank, count), {}, {}};
    TE_FL_ASSIGN_OR_RETURN(source.file, map_safetensors(source.path));
    if (optimizer) TE_FL_RETURN_IF_ERROR(join_optimizer(source.path, source.file));
    for (const NamedTensor& t : source.file.tensors) source.tensors.emplace(t.name, t.tensor);
    sources.push_back(std::move(source));
  }
  constexpr const char* kSteps = "te_fl.optimizer_steps";
  for (Source& source : sources) {
    if (source.file.metadata[kSteps] == sources[0].file.metadata[kSteps]) continue;
    return Status(StatusCode::kDataLoss,
                  source.path + ": it is of step " + source.file.metadata[kSteps] + " and " +
                      sources[0].path + " of step " + sources[0].file.metadata[kSteps] +
                      "; they are not of one save");
  }
  return sources;
}

Status bad_place(const Source& source, const std::string& name) {
  return Status(StatusCode::kDataLoss,
                source.path + ": the place of tensor " + name +
                    " in its whole is not there, or does not fit the tensor and the other files'");
}

struct Placed {
  Tensor tensor;
  Shard place;
};

// The parts of a tensor in all files; only the first file's tensor if it is not sharded.
Result<std::vector<Placed>> find_parts(const std::vector<Source>& sources,
                                       const std::string& name) {
  const Tensor& first = sources[0].tensors.at(name);
  const std::string key = std::string(kPrefix) + parameter_name(name);
  if (!sources[0].file.metadata.contains(key)) {
    return std::vector<Placed>{{first, place_of_whole(first.shape())}};
  }
  std::vector<Placed> parts;
  int64_t elements = 1;
  for (const Source& source : sources) {
    const auto tensor = source.tensors.find(name);
    const auto place = source.file.metadata.find(key);
    Placed part;
    if (tensor == source.tensors.end() || place == source.file.metadata.end() ||
        !parse_place(place->second, part.place)) {
      return bad_place(source, name);
    }
    part.tensor = tensor->second;
    const auto rank = static_cast<size_t>(part.tensor.rank());
    if (part.place.whole.size() != rank || part.place.begin.size() != rank ||
        (!parts.empty() && part.place.whole != parts[0].place.whole)) {
      return bad_place(source, name);
    }
    parts.push_back(std::move(part));
  }
  for (const int64_t extent : parts[0].place.whole) elements *= extent;
  for (const Placed& part : parts) elements -= part.tensor.numel();
  if (elements != 0) return bad_place(sources.back(), name);
  return parts;
}

// The complete tensor, assembled from all files.
Result<Tensor> join_parts(const std::vector<Source>& sources, const std::string& name) {
  TE_FL_ASSIGN_OR_RETURN(const std::vector<Placed> parts, find_parts(sources, name));
  if (parts.size() == 1) return parts[0].tensor;
  TE_FL_ASSIGN_OR_RETURN(Tensor whole,
                         Tensor::empty(parts[0].place.whole, parts[0].tensor.dtype()));
  for (size_t i = 0; i < parts.size(); ++i) {
    if (!copy_part(whole, parts[i].tensor, parts[i].place, true))
      return bad_place(sources[i], name);
  }
  return whole;
}

Result<Tensor> cut(const Tensor& whole, const Parameter& parameter, const std::string& name,
                   const std::string& path) {
  TE_FL_ASSIGN_OR_RETURN(Tensor part, Tensor::empty(parameter.value.shape(), whole.dtype()));
  if (copy_part(whole, part, parameter.shard, false)) return part;
  return invalid_argument(path + ": tensor " + name + " is " + whole.describe() +
                          " as a whole, of which this rank has no part of " +
                          parameter.value.describe() + "; the sizes of the module are others");
}

constexpr std::string_view kScale = ".scale_inv", kAmax = ".amax";

// True if `name` is a parameter that exists in FP8 only, which is recognised by the scale tensor
// beside it.
bool is_codes(const Source& source, const std::string& name) {
  return source.tensors.contains(name) && source.tensors.contains(name + std::string(kScale));
}

// True if the tensor is the scale or amax of an FP8-only parameter; these are loaded with the
// parameter.
bool beside_codes(const Source& source, std::string_view name) {
  for (const std::string_view end : {kScale, kAmax}) {
    if (!name.ends_with(end)) continue;
    return is_codes(source, std::string(name.substr(0, name.size() - end.size())));
  }
  return false;
}

// This rank's part of an FP8-only parameter, assembled from all files, as FP8 data or as F32
// values.
Result<std::vector<NamedTensor>> own_codes(const std::vector<Source>& sources,
                                           const NamedParameter& parameter,
                                           const std::string& path) {
  const std::string& name = parameter.name;
  TE_FL_ASSIGN_OR_RETURN(std::vector<Placed> parts, find_parts(sources, name));
  std::vector<CodesPart> files;
  for (size_t i = 0; i < parts.size(); ++i) {
    const auto beside = [&](std::string_view end) {
      const auto found = sources[i].tensors.find(name + std::string(end));
      const bool one = found != sources[i].tensors.end() && found->second.numel() == 1 &&
                       found->second.dtype() == DType::kF32;
      return one ? found->second : Tensor();
    };
    CodesPart file{parts[i].tensor, beside(kScale), beside(kAmax), parts[i].place};
    if (!file.scale_inv.defined()) {
      return Status(StatusCode::kDataLoss, sources[i].path + ": tensor " + name + ".scale_inv, " +
                                               "by which the codes are multiplied, is missing or "
                                               "not f32[1]");
    }
    files.push_back(std::move(file));
  }
  const Shard& own = parameter.parameter->shard;
  auto loaded = codes_of_part(name, files, parameter.value().shape(),
                              own.whole.empty() ? place_of_whole(files[0].place.whole) : own);
  if (!loaded.ok()) return loaded.status().wrap(path);
  return loaded;
}

}  // namespace

std::string shard_path(const std::string& path, int rank, int size) {
  if (size == 1) return path;
  return path + "." + std::to_string(rank) + "-of-" + std::to_string(size);
}

Result<Metadata> list_places(const std::vector<NamedParameter>& parameters) {
  Metadata places;
  for (const NamedParameter& p : parameters) {
    if (p.parameter->shard.whole.empty()) continue;
    if (p.value().quantized() && p.value().scaling() != Scaling::kTensor) {
      return invalid_argument("save_checkpoint: the parameter " + p.name +
                              " is divided over ranks and " + p.value().describe() +
                              ", whose scales have no places of their own; save codes that are "
                              "scaled by tensor, or values");
    }
    places[std::string(kPrefix) + p.name] = place_text(p.parameter->shard);
  }
  return places;
}

Result<SafetensorsFile> load_shards(const std::string& path, int rank, int size,
                                    const std::vector<NamedParameter>& parameters, bool optimizer) {
  TE_FL_ASSIGN_OR_RETURN(const std::vector<Source> sources, open_all(path, optimizer));
  const bool same = static_cast<int>(sources.size()) == size;
  if (same) return sources[static_cast<size_t>(rank)].file;
  std::map<std::string, const NamedParameter*> own;
  for (const NamedParameter& p : parameters) own.emplace(p.name, &p);
  SafetensorsFile result{sources[0].file.metadata, {}};
  for (const NamedTensor& t : sources[0].file.tensors) {
    const auto found = own.find(parameter_name(t.name));
    const NamedParameter* const target = found == own.end() ? nullptr : found->second;
    if (beside_codes(sources[0], t.name)) continue;
    if (target != nullptr && is_codes(sources[0], t.name)) {
      TE_FL_ASSIGN_OR_RETURN(auto tensors, own_codes(sources, *target, path));
      std::ranges::move(tensors, std::back_inserter(result.tensors));
      continue;
    }
    TE_FL_ASSIGN_OR_RETURN(Tensor tensor, join_parts(sources, t.name));
    if (target != nullptr && !target->parameter->shard.whole.empty()) {
      TE_FL_ASSIGN_OR_RETURN(tensor, cut(tensor, *target->parameter, t.name, path));
    }
    result.tensors.push_back({t.name, std::move(tensor)});
  }
  return result;
}

}  // namespace te_fl::nn::detail
