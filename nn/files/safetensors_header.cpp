#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <tuple>

#include "nn/files/safetensors.hpp"

namespace te_fl::nn {
namespace detail {
namespace {

struct DTypeName {
  std::string_view name;
  DType dtype;
};
constexpr std::array<DTypeName, 16> kNames = {{{"BOOL", DType::kBool},
                                               {"U8", DType::kU8},
                                               {"I8", DType::kI8},
                                               {"F8_E4M3", DType::kF8E4M3},
                                               {"F8_E5M2", DType::kF8E5M2},
                                               {"F8_E8M0", DType::kF8E8M0},
                                               {"U16", DType::kU16},
                                               {"I16", DType::kI16},
                                               {"F16", DType::kF16},
                                               {"BF16", DType::kBF16},
                                               {"U32", DType::kU32},
                                               {"I32", DType::kI32},
                                               {"F32", DType::kF32},
                                               {"U64", DType::kU64},
                                               {"I64", DType::kI64},
                                               {"F64", DType::kF64}}};

std::optional<DType> find_dtype(std::string_view name) {
  for (const DTypeName& entry : kNames) {
    if (entry.name == name) return entry.dtype;
  }
  return std::nullopt;
}

Status corrupt(std::string_view source, std::string text) {
  Status status(StatusCode::kDataLoss, std::string(source) + ": " + std::move(text));
  status.set_clean();
  return status;
}

// The size of a compact tensor in bytes; nullopt on overflow.
std::optional<uint64_t> byte_size(const Shape& shape, DType dtype) {
  uint64_t total = static_cast<uint64_t>(bits(dtype)) / 8;
  for (int64_t extent : shape) {
    if (__builtin_mul_overflow(total, static_cast<uint64_t>(extent), &total)) return std::nullopt;
  }
  return total;
}

using Json = nlohmann::json;

// Reads one member of the header object.
class EntryReader {
 public:
  EntryReader(std::string_view source, const std::string& name, const Json& value,
              uint64_t data_bytes)
      : source_(source), name_(name), value_(value), data_bytes_(data_bytes) {}

  Result<SafetensorsEntry> read() {
    SafetensorsEntry entry;
    entry.name = name_;
    if (!value_.is_object()) return error("is not described by an object");
    for (const char* key : {"dtype", "shape", "data_offsets"}) {
      if (!value_.contains(key)) return error(std::string("has no \"") + key + "\"");
    }
    TE_FL_RETURN_IF_ERROR(read_dtype(entry));
    TE_FL_RETURN_IF_ERROR(read_shape(entry));
    TE_FL_RETURN_IF_ERROR(read_offsets(entry));
    return entry;
  }

 private:
  Status error(const std::string& what) const {
    return corrupt(source_, "tensor \"" + name_ + "\" " + what);
  }

  Status read_dtype(SafetensorsEntry& entry) {
    const Json& dtype = value_["dtype"];
    if (!dtype.is_string()) return error("has a dtype that is not a string");
    const std::string text = dtype.get<std::string>();
    std::optional<DType> found = find_dtype(text);
    if (!found) return error("has the dtype \"" + text + "\", which is not known");
    entry.dtype = *found;
    return {};
  }

  Status read_shape(SafetensorsEntry& entry) {
    const Json& shape = value_["shape"];
    if (!shape.is_array()) return error("has a shape that is not an array");
    if (shape.size() > static_cast<size_t>(kMaxRank)) {
      return error("has rank " + std::to_string(shape.size()) + "; at most " +
                   std::to_string(kMaxRank) + " is supported");
    }
    for (const Json& extent : shape) {
      if (!extent.is_number_unsigned() ||
          extent.get<uint64_t>() > static_cast<uint64_t>(INT64_MAX)) {
        return error("has the extent " + extent.dump() +
                     "; it must be an integer from 0 to 2^63-1");
      }
      entry.shape.push_back(static_cast<int64_t>(extent.get<uint64_t>()));
    }
    return {};
  }

  Status read_offsets(SafetensorsEntry& entry) {
    const Json& offsets = value_["data_offsets"];
    if (!offsets.is_array() || offsets.size() != 2 || !offsets[0].is_number_unsigned() ||
        !offsets[1].is_number_unsigned()) {
      return error("has data_offsets that are not two integers of at least 0");
    }
    entry.begin = offsets[0].get<uint64_t>();
    entry.end = offsets[1].get<uint64_t>();
    const std::string range =
        "[" + std::to_string(entry.begin) + ", " + std::to_string(entry.end) + ")";
    if (entry.begin > entry.end || entry.end > data_bytes_) {
      return error("has data_offsets " + range + " outside the data section of " +
                   std::to_string(data_bytes_) + " bytes; the file is truncated or corrupt");
    }
    std::optional<uint64_t> bytes = byte_size(entry.shape, entry.dtype);
    if (!bytes) return error("has a shape whose size overflows");
    if (*bytes != entry.end - entry.begin) {
      return error("has data_offsets " + range + " of " + std::to_string(entry.end - entry.begin) +
                   " bytes, but its dtype and shape need " + std::to_string(*bytes));
    }
    return {};
  }

  std::string_view source_;
  const std::string& name_;
  const Json& value_;
  uint64_t data_bytes_;
};

Result<Json> parse_json(std::string_view text, std::string_view source) {
  // nlohmann keeps the last of two members with the same name, but the format forbids duplicates.
  // The header object itself has depth 1.
  constexpr size_t kMostDeep = 8;
  std::array<std::set<std::string>, kMostDeep + 2> keys;  // keys of the currently open objects
  std::string member, duplicate;
  bool too_deep = false;
  auto watch = [&](int level, Json::parse_event_t event, Json& parsed) {
    const auto depth = static_cast<size_t>(level);
    if (depth > kMostDeep) too_deep = true;
    if (too_deep) return false;
    if (event == Json::parse_event_t::object_start) keys[depth + 1].clear();
    if (event != Json::parse_event_t::key) return true;
    const auto key = parsed.get<std::string>();
    if (depth == 1) member = key;
    if (!keys[depth].insert(key).second && duplicate.empty()) {
      duplicate = depth == 1 ? "the header names the tensor \"" + key + "\" twice"
                             : "\"" + member + "\" has \"" + key + "\" twice";
    }
    return true;
  };
  Json json = Json::parse(text, watch, /*allow_exceptions=*/false);
  if (too_deep) return corrupt(source, "the header is nested too deeply");
  if (json.is_discarded()) return corrupt(source, "the header is not valid JSON");
  if (!json.is_object()) return corrupt(source, "the header is JSON, but not an object");
  // nlohmann skips a byte order mark and leading spaces, which other readers refuse.
  if (text.front() != '{') return corrupt(source, "the header does not begin with {");
  if (!duplicate.empty()) return corrupt(source, duplicate);
  return json;
}

Status read_metadata(const Json& value, std::string_view source, Metadata& metadata) {
  if (!value.is_object()) return corrupt(source, "__metadata__ is not an object");
  for (const auto& [key, text] : value.items()) {
    if (!text.is_string()) {
      return corrupt(source, "__metadata__ member \"" + key + "\" is not a string");
    }
    metadata[key] = text.get<std::string>();
  }
  return {};
}

// Checks that the tensors cover each byte of the data section exactly once, as the format requires.
Status check_cover(const std::vector<SafetensorsEntry>& entries, uint64_t data_bytes,
                   std::string_view source) {
  uint64_t position = 0;
  const SafetensorsEntry* previous = nullptr;
  for (const SafetensorsEntry& entry : entries) {
    if (entry.begin < position) {
      return corrupt(source,
                     "tensors \"" + previous->name + "\" and \"" + entry.name + "\" overlap");
    }
    if (entry.begin > position) {
      return corrupt(source, std::to_string(entry.begin - position) + " bytes before tensor \"" +
                                 entry.name + "\" belong to no tensor");
    }
    position = entry.end;
    previous = &entry;
  }
  if (position != data_bytes) {
    return corrupt(
        source, "the last " + std::to_string(data_bytes - position) + " bytes belong to no tensor");
  }
  return {};
}

}  // namespace

std::string_view safetensors_dtype(DType dtype) {
  for (const DTypeName& entry : kNames) {
    if (entry.dtype == dtype) return entry.name;
  }
  return {};
}

Result<uint64_t> header_length(std::span<const std::byte> prefix, uint64_t file_size,
                               std::string_view source) {
  static_assert(std::endian::native == std::endian::little);
  if (file_size < kLengthBytes || prefix.size() < kLengthBytes) {
    return corrupt(source, "the file has " + std::to_string(file_size) +
                               " bytes; a safetensors file has at least 8");
  }
  uint64_t length = 0;
  std::memcpy(&length, prefix.data(), sizeof length);
  if (length > kMaxHeaderBytes) {
    return corrupt(source, "the header length is " + std::to_string(length) + "; at most " +
                               std::to_string(kMaxHeaderBytes) +
                               " is allowed: not a safetensors file, or corrupt");
  }
  if (length > file_size - kLengthBytes) {
    return corrupt(source, "the header should have " + std::to_string(length) +
                               " bytes, but only " + std::to_string(file_size - kLengthBytes) +
                               " follow: the file is truncated");
  }
  return length;
}

}  // namespace detail

Result<SafetensorsHeader> parse_safetensors_header(std::span<const std::byte> prefix,
                                                   uint64_t file_size, std::string_view source) {
  TE_FL_ASSIGN_OR_RETURN(uint64_t length, detail::header_length(prefix, file_size, source));
  if (prefix.size() - detail::kLengthBytes < length) {
    return detail::corrupt(source, "the header was not read to its end");
  }
  const std::string_view text(reinterpret_cast<const char*>(prefix.data()) + detail::kLengthBytes,
                              length);
  TE_FL_ASSIGN_OR_RETURN(detail::Json json, detail::parse_json(text, source));
  SafetensorsHeader header;
  header.data_offset = detail::kLengthBytes + length;
  const uint64_t data_bytes = file_size - header.data_offset;
  for (const auto& [name, value] : json.items()) {
    if (name == "__metadata__") {
      TE_FL_RETURN_IF_ERROR(detail::read_metadata(value, source, header.metadata));
      continue;
    }
    TE_FL_ASSIGN_OR_RETURN(SafetensorsEntry entry,
                           detail::EntryReader(source, name, value, data_bytes).read());
    header.entries.push_back(std::move(entry));
  }
  std::sort(header.entries.begin(), header.entries.end(), [](const auto& a, const auto& b) {
    return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
  });
  TE_FL_RETURN_IF_ERROR(detail::check_cover(header.entries, data_bytes, source));
  return header;
}

}  // namespace te_fl::nn
