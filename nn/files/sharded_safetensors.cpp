#include "te_fl/nn/files/sharded_safetensors.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <span>
#include <utility>

#include "core/base/file.hpp"
#include "nn/files/safetensors.hpp"
#include "te_fl/device.hpp"
#include "te_fl/log.hpp"

namespace te_fl::nn {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr uint64_t kMaxIndexBytes = 256'000'000;

// A private memory mapping of a file.
class Mapping {
 public:
  static Result<std::shared_ptr<Mapping>> open(const std::string& path) {
    const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd < 0) return failure(path, "cannot open");
    struct stat info {};
    const bool known = ::fstat(fd, &info) == 0;
    if (!known || !S_ISREG(info.st_mode) || info.st_size == 0) {
      ::close(fd);
      if (!known) return failure(path, "cannot stat");
      if (!S_ISREG(info.st_mode)) return invalid_argument(path + ": is not a regular file");
      return Status(StatusCode::kDataLoss, path + ": the file is empty");
    }
    auto mapping = std::make_shared<Mapping>();
    mapping->size_ = static_cast<size_t>(info.st_size);
    void* const at =
        ::mmap(nullptr, mapping->size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, fd, 0);
    ::close(fd);
    if (at == MAP_FAILED) return failure(path, "cannot map");
    mapping->bytes_ = static_cast<std::byte*>(at);
    return mapping;
  }
  Mapping() = default;
  ~Mapping() {
    if (bytes_ != nullptr) ::munmap(bytes_, size_);
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  std::byte* bytes() const noexcept { return bytes_; }
  size_t size() const noexcept { return size_; }

 private:
  static Status failure(const std::string& path, const char* what) {
    const int error = errno;
    return Status(error == ENOENT ? StatusCode::kNotFound : StatusCode::kInternal,
                  path + ": " + what + ": " + std::strerror(error));
  }
  std::byte* bytes_ = nullptr;
  size_t size_ = 0;
};

Result<Tensor> make_view(const SafetensorsEntry& entry, const std::shared_ptr<Mapping>& mapping,
                         uint64_t data_offset) {
  std::byte* const at = mapping->bytes() + data_offset + entry.begin;
  const auto alignment = static_cast<uintptr_t>(bits(entry.dtype)) / 8;
  if (reinterpret_cast<uintptr_t>(at) % alignment == 0) {
    return Tensor::wrap(at, entry.shape, {}, entry.dtype, Device(), mapping);
  }
  TE_FL_ASSIGN_OR_RETURN(Tensor copy, Tensor::empty(entry.shape, entry.dtype));
  std::memcpy(copy.raw_data(), at, entry.end - entry.begin);
  return copy;
}

Status data_loss(const std::string& path, const std::string& what) {
  Status status(StatusCode::kDataLoss, path + ": " + what);
  status.set_clean();
  return status;
}

using WeightMap = std::map<std::string, std::string>;  // tensor name to file name

Result<WeightMap> read_index(const std::string& path) {
  Result<std::string> text = core::read_file(path, kMaxIndexBytes);
  if (!text.ok()) return text.status().wrap(path);
  const Json json = Json::parse(*text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object() || !json.contains("weight_map") || !json["weight_map"].is_object()) {
    return data_loss(path,
                     "is no index: it must be a JSON object whose \"weight_map\" is an "
                     "object");
  }
  WeightMap map;
  for (const auto& [tensor, file] : json["weight_map"].items()) {
    const std::string name = file.is_string() ? file.get<std::string>() : std::string();
    if (name.empty() || name == "." || name == ".." || name.find('/') != std::string::npos ||
        name.find('\0') != std::string::npos) {
      return data_loss(path, "tensor \"" + tensor + "\" has the file " + file.dump() +
                                 "; it must be the name of a file beside the index");
    }
    map[tensor] = name;
  }
  return map;
}

Result<SafetensorsFile> load_files(const std::string& path, WeightMap map) {
  std::set<std::string> files;
  for (const auto& [tensor, file] : map) files.insert(file);
  SafetensorsFile result;
  for (const std::string& file : files) {
    const std::string shard = (fs::path(path).parent_path() / file).string();
    TE_FL_ASSIGN_OR_RETURN(SafetensorsFile part, map_safetensors(shard));
    if (result.tensors.empty()) result.metadata = std::move(part.metadata);
    for (NamedTensor& t : part.tensors) {
      const auto found = map.find(t.name);
      if (found == map.end() || found->second != file) {
        return data_loss(shard,
                         "has the tensor \"" + t.name + "\", which the index " + path +
                             (found == map.end() ? " does not name" : " has in " + found->second));
      }
      map.erase(found);
      result.tensors.push_back(std::move(t));
    }
  }
  if (map.empty()) return result;
  return data_loss(path, "tensor \"" + map.begin()->first + "\" is not in " + map.begin()->second);
}

Result<SafetensorsFile> load_index(const std::string& path) {
  TE_FL_ASSIGN_OR_RETURN(WeightMap map, read_index(path));
  for (;;) {
    Result<SafetensorsFile> file = load_files(path, map);
    if (file.ok() || file.status().code() != StatusCode::kNotFound) return file;
    // Another save may have removed this model's files; if the index has changed, try again with
    // it.
    TE_FL_ASSIGN_OR_RETURN(WeightMap now, read_index(path));
    if (now == map) return file;
    map = std::move(now);
  }
}

std::string numbered(const std::string& stem, size_t index, size_t count) {
  char digits[48];
  std::snprintf(digits, sizeof digits, "-%05zu-of-%05zu", index + 1, count);
  return stem + digits + ".safetensors";
}

// The files that an index lists; empty if the index is missing or invalid.
std::set<std::string> list_files(const std::string& index) {
  std::set<std::string> files;
  const Result<WeightMap> map = read_index(index);
  if (!map.ok()) return files;
  for (const auto& [tensor, file] : *map) files.insert(file);
  return files;
}

// Names for `count` shards that the previous index does not use, so that the previous model stays
// intact until the new index replaces the old one: STEM-00001-of-..., otherwise
// STEM.2-00001-of-..., and so on.
std::vector<std::string> shard_names(const std::string& stem, size_t count,
                                     const std::set<std::string>& before) {
  for (int attempt = 1;; ++attempt) {
    const std::string start = attempt == 1 ? stem : stem + "." + std::to_string(attempt);
    std::vector<std::string> names;
    for (size_t i = 0; i < count; ++i) names.push_back(numbered(start, i, count));
    if (std::ranges::none_of(names, [&](const auto& name) { return before.contains(name); })) {
      return names;
    }
  }
}

// Removes a file of the replaced model that a reader could otherwise load.
Status remove_found(const std::string& path) {
  if (::unlink(path.c_str()) == 0 || errno == ENOENT) return {};
  const std::string why = std::strerror(errno);
  return failed_precondition(path +
                             ": belongs to the model of before, which readers may find by "
                             "it, and cannot be removed: " +
                             why);
}

// Removes shards that no index lists any more.
void remove_shards(const fs::path& folder, const std::set<std::string>& files) {
  for (const std::string& file : files) {
    const std::string path = (folder / file).string();
    if (!file.ends_with(".safetensors") || ::unlink(path.c_str()) == 0 || errno == ENOENT) continue;
    log::warning(path +
                 ": a shard of the model of before cannot be removed: " + std::strerror(errno));
  }
}

uint64_t bytes_of(const Tensor& tensor) {
  return static_cast<uint64_t>(bytes_for(tensor.dtype(), tensor.numel()));
}

// Divides the tensors, in their order, into groups of at most `most` bytes.
std::vector<std::vector<NamedTensor>> divide(const std::vector<NamedTensor>& tensors,
                                             uint64_t most) {
  std::vector<std::vector<NamedTensor>> shards(1);
  uint64_t used = 0;
  for (const NamedTensor& t : tensors) {
    const uint64_t bytes = t.tensor.defined() ? bytes_of(t.tensor) : 0;
    if (!shards.back().empty() && bytes > most - std::min(used, most)) {
      shards.emplace_back();
      used = 0;
    }
    shards.back().push_back(t);
    used += bytes;
  }
  return shards;
}

// Writes the shards, then the index. After an error, removes the shards that were written.
Status write_shards(const fs::path& folder, const std::vector<std::string>& names,
                    const std::vector<std::vector<NamedTensor>>& shards, const Metadata& metadata,
                    const std::string& index) {
  Json map = Json::object();
  uint64_t total = 0;
  Status status;
  std::set<std::string> written;
  for (size_t i = 0; i < shards.size(); ++i) {
    status = save_safetensors((folder / names[i]).string(), shards[i], metadata);
    if (!status.ok()) break;
    written.insert(names[i]);
    for (const NamedTensor& t : shards[i]) {
      map[t.name] = names[i];
      total += bytes_of(t.tensor);
    }
  }
  if (status.ok()) {
    const Json json = {{"metadata", {{"total_size", total}}}, {"weight_map", std::move(map)}};
    status = core::replace_file(index, json.dump(2) + "\n").wrap(index + " cannot be written");
  }
  if (!status.ok()) remove_shards(folder, written);
  return status;
}

}  // namespace

Result<SafetensorsFile> map_safetensors(const std::string& path) {
  TE_FL_ASSIGN_OR_RETURN(const std::shared_ptr<Mapping> mapping, Mapping::open(path));
  const std::span<const std::byte> bytes(mapping->bytes(), mapping->size());
  TE_FL_ASSIGN_OR_RETURN(SafetensorsHeader header,
                         parse_safetensors_header(bytes, bytes.size(), path));
  SafetensorsFile result;
  result.metadata = std::move(header.metadata);
  for (const SafetensorsEntry& entry : header.entries) {
    Result<Tensor> tensor = make_view(entry, mapping, header.data_offset);
    if (!tensor.ok()) return tensor.status().wrap(path + ": tensor \"" + entry.name + "\"");
    result.tensors.push_back({entry.name, std::move(*tensor)});
  }
  return result;
}

Result<SafetensorsFile> load_sharded(const std::string& path, const std::string& stem) {
  std::error_code error;
  if (!fs::is_directory(path, error)) {
    return path.ends_with(".json") ? load_index(path) : map_safetensors(path);
  }
  const fs::path base = fs::path(path) / (stem + ".safetensors");
  const std::string index = base.string() + ".index.json";
  if (fs::exists(index, error)) return load_index(index);
  if (fs::exists(base, error)) return map_safetensors(base.string());
  return Status(StatusCode::kNotFound, path + ": the folder has neither " + stem +
                                           ".safetensors.index.json nor " + stem + ".safetensors");
}

Status save_sharded(const std::string& folder, const std::vector<NamedTensor>& tensors,
                    const ShardedOptions& options) {
  if (options.max_shard_bytes == 0 || options.stem.empty() ||
      options.stem.find('/') != std::string::npos) {
    return invalid_argument(
        "save_sharded: max_shard_bytes is " + std::to_string(options.max_shard_bytes) +
        " and stem \"" + options.stem + "\"; they must be at least 1, and a name without a folder");
  }
  if (!detail::is_text(options.stem)) {
    return invalid_argument("save_sharded: the stem \"" + options.stem +
                            "\" is not UTF-8, which an index of several files cannot hold");
  }
  std::set<std::string> names;  // over all files; save_safetensors checks each file
  for (const NamedTensor& t : tensors) {
    if (names.insert(t.name).second) continue;
    return invalid_argument("save_sharded: tensor \"" + t.name + "\" is given twice");
  }
  const auto shards = divide(tensors, options.max_shard_bytes);
  const std::string single = options.stem + ".safetensors";
  const std::string index = (fs::path(folder) / (single + ".index.json")).string();
  std::set<std::string> before = list_files(index);
  // A single file that the previous index lists cannot be replaced directly, since that would
  // change the previous model.
  if (shards.size() == 1 && !before.contains(single)) {
    TE_FL_RETURN_IF_ERROR(
        save_safetensors((fs::path(folder) / single).string(), shards[0], options.metadata));
    TE_FL_RETURN_IF_ERROR(remove_found(index));
    remove_shards(folder, before);
    return {};
  }
  const std::vector<std::string> files = shard_names(options.stem, shards.size(), before);
  TE_FL_RETURN_IF_ERROR(write_shards(folder, files, shards, options.metadata, index));
  before.erase(single);
  TE_FL_RETURN_IF_ERROR(remove_found((fs::path(folder) / single).string()));
  remove_shards(folder, before);
  return {};
}

}  // namespace te_fl::nn
