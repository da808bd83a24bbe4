#include "nn/files/shard_files.hpp"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <map>
#include <set>
#include <utility>

#include "nn/files/optimizer_files.hpp"
#include "nn/files/place_text.hpp"
#include "te_fl/nn/files/sharded_safetensors.hpp"

namespace te_fl::nn::detail {
namespace {

constexpr std::string_view kPrefix = "te_fl.shard.";

std::string text_of(const Shard& shard) {
  Shape rows;
  for (const Shard::Rows& r : shard.rows) rows.insert(rows.end(), {r.begin, r.count});
  return list_text(shard.whole) + ";" + list_text(shard.begin) + ";" + list_text(rows);
}

bool parse(std::string_view text, Shard& shard) {
  const size_t first = text.find(';');
  const size_t second = first == text.npos ? text.npos : text.find(';', first + 1);
  if (second == text.npos) return false;
  Shape rows;
  if (!parse_list(text.substr(0, first), shard.whole) ||
      !parse_list(text.substr(first + 1, second - first - 1), shard.begin) ||
      !parse_list(text.substr(second + 1), rows) || rows.size() % 2 != 0) {
    return false;
  }
  for (size_t i = 0; i < rows.size(); i += 2) shard.rows.push_back({rows[i], rows[i + 1]});
  return true;
}

// The rows of the whole that the shard has, one by one; empty if they do not lie in it.
std::vector<int64_t> rows_of(const Shard& shard, int64_t count) {
  std::vector<int64_t> rows;
  if (shard.begin[0] > shard.whole[0]) return rows;
  if (shard.rows.empty()) {
    for (int64_t i = 0; i < count; ++i) rows.push_back(shard.begin[0] + i);
  }
  for (const Shard::Rows& range : shard.rows) {
    if (range.count > count || range.begin > shard.whole[0]) return {};
    for (int64_t i = 0; i < range.count; ++i) rows.push_back(range.begin + i);
  }
  const bool inside = static_cast<int64_t>(rows.size()) == count &&
                      std::ranges::all_of(rows, [&](int64_t r) { return r < shard.whole[0]; });
  return inside ? rows : std::vector<int64_t>();
}

// Copies between a tensor and its place in the whole, both compact on the host, of one or two
// dimensions. False if the place does not fit them.
bool copy_part(const Tensor& whole, const Tensor& part, const Shard& shard, bool to_whole) {
  const auto rank = static_cast<size_t>(part.rank());
  if (rank < 1 || rank > 2 || shard.whole.size() != rank || shard.begin.size() != rank ||
      !std::ranges::equal(whole.shape(), shard.whole) || whole.dtype() != part.dtype()) {
    return false;
  }
  const std::vector<int64_t> rows = rows_of(shard, part.size(0));
  const int64_t columns = rank == 2 ? part.size(1) : 1, width = rank == 2 ? whole.size(1) : 1;
  const int64_t first = rank == 2 ? shard.begin[1] : 0;
  if (rows.empty() || first > width - columns) return false;
  const auto bytes = static_cast<size_t>(bytes_for(part.dtype(), columns));
  for (size_t i = 0; i < rows.size(); ++i) {
    char* const there = whole.data<char>() + bytes_for(whole.dtype(), rows[i] * width + first);
    char* const here =
        part.data<char>() + bytes_for(part.dtype(), static_cast<int64_t>(i) * columns);
    std::memcpy(to_whole ? there : here, to_whole ? here : there, bytes);
  }
  return true;
}

struct Source {
  std::string path;
  SafetensorsFile file;
  std::map<std::string, Tensor> tensors;
};

// The number of ranks whose files lie at the path.
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

// The tensor of all files put together; the first file's if it is not divided there.
Result<Tensor> whole_of(const std::vector<Source>& sources, const std::string& name) {
  const Tensor& first = sources[0].tensors.at(name);
  const std::string key = std::string(kPrefix) + parameter_of(name);
  if (!sources[0].file.metadata.contains(key)) return first;
  Tensor whole;
  int64_t elements = 0;
  for (const Source& source : sources) {
    const auto tensor = source.tensors.find(name);
    const auto place = source.file.metadata.find(key);
    Shard shard;
    if (tensor == source.tensors.end() || place == source.file.metadata.end() ||
        !parse(place->second, shard)) {
      return bad_place(source, name);
    }
    if (!whole.defined()) {
      TE_FL_ASSIGN_OR_RETURN(whole, Tensor::empty(shard.whole, first.dtype()));
    }
    if (!copy_part(whole, tensor->second, shard, true)) return bad_place(source, name);
    elements += tensor->second.numel();
  }
  if (elements != whole.numel()) return bad_place(sources.back(), name);
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

}  // namespace

std::string shard_path(const std::string& path, int rank, int size) {
  if (size == 1) return path;
  return path + "." + std::to_string(rank) + "-of-" + std::to_string(size);
}

Result<Metadata> places_of(const std::vector<NamedParameter>& parameters) {
  Metadata places;
  for (const NamedParameter& p : parameters) {
    if (p.parameter->shard.whole.empty()) continue;
    if (p.value().quantized()) {
      return invalid_argument("save_checkpoint: the parameter " + p.name +
                              " is divided over ranks and of FP8 codes alone, whose parts have "
                              "scales of their own; save a module made without "
                              "quantized_model_init");
    }
    places[std::string(kPrefix) + p.name] = text_of(p.parameter->shard);
  }
  return places;
}

Result<SafetensorsFile> load_shards(const std::string& path, int rank, int size,
                                    const std::vector<NamedParameter>& parameters, bool optimizer) {
  TE_FL_ASSIGN_OR_RETURN(const std::vector<Source> sources, open_all(path, optimizer));
  const bool same = static_cast<int>(sources.size()) == size;
  if (same) return sources[static_cast<size_t>(rank)].file;
  std::map<std::string, const Parameter*> divided;
  for (const NamedParameter& p : parameters) {
    if (!p.parameter->shard.whole.empty()) divided.emplace(p.name, p.parameter.get());
  }
  SafetensorsFile result{sources[0].file.metadata, {}};
  for (const NamedTensor& t : sources[0].file.tensors) {
    TE_FL_ASSIGN_OR_RETURN(Tensor tensor, whole_of(sources, t.name));
    if (const auto found = divided.find(parameter_of(t.name)); found != divided.end()) {
      TE_FL_ASSIGN_OR_RETURN(tensor, cut(tensor, *found->second, t.name, path));
    }
    result.tensors.push_back({t.name, std::move(tensor)});
  }
  return result;
}

}  // namespace te_fl::nn::detail
