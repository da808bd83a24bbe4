#include "te_fl/nn/files/safetensors.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>

#include "core/base/file.hpp"
#include "nn/files/safetensors.hpp"

namespace te_fl::nn {
namespace {

// A file descriptor that closes itself.
class File {
 public:
  explicit File(int fd) : fd_(fd) {}
  ~File() {
    if (fd_ >= 0) ::close(fd_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  int fd() const { return fd_; }

 private:
  int fd_;
};

Status io_error(const std::string& path, const std::string& what) {
  const int error = errno;
  return Status(error == ENOENT ? StatusCode::kNotFound : StatusCode::kInternal,
                path + ": " + what + ": " + std::strerror(error));
}

Status read_exactly(int fd, void* out, uint64_t bytes, uint64_t offset, const std::string& path) {
  auto* to = static_cast<char*>(out);
  while (bytes > 0) {
    const ssize_t got =
        ::pread(fd, to, std::min<uint64_t>(bytes, 1u << 30), static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return io_error(path, "cannot read");
    if (got == 0) {
      return Status(StatusCode::kDataLoss, path + ": the file became shorter while it was read");
    }
    to += got;
    offset += static_cast<uint64_t>(got);
    bytes -= static_cast<uint64_t>(got);
  }
  return {};
}

Result<Tensor> read_tensor(int fd, const SafetensorsEntry& entry, uint64_t data_offset,
                           const std::string& path) {
  Result<Tensor> tensor = Tensor::empty(entry.shape, entry.dtype);
  if (!tensor.ok()) return tensor.status().wrap(path + ": tensor \"" + entry.name + "\"");
  TE_FL_RETURN_IF_ERROR(read_exactly(fd, tensor->raw_data(), entry.end - entry.begin,
                                     data_offset + entry.begin, path));
  return tensor;
}

// A compact host copy of `tensor`; the tensor itself if it is compact in host memory.
Result<Tensor> on_host(const Tensor& tensor) {
  if (tensor.device().is_host() && tensor.contiguous()) return tensor;
  return tensor.to(Device());
}

uint64_t tensor_bytes(const Tensor& tensor) {
  return static_cast<uint64_t>(bytes_for(tensor.dtype(), tensor.numel()));
}

}  // namespace

bool detail::is_text(const std::string& text) {
  try {
    (void)nlohmann::json(text).dump();
    return true;
  } catch (const nlohmann::json::type_error&) {
    return false;
  }
}

namespace {

// The JSON header, padded with spaces so that the data starts at a multiple of 8 bytes.
Result<std::string> make_header(const std::vector<NamedTensor>& tensors, const Metadata& metadata) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  for (const auto& [key, value] : metadata) {
    if (detail::is_text(key) && detail::is_text(value)) continue;
    return invalid_argument("save_safetensors: metadata \"" + key +
                            "\" or its value is not UTF-8, which the format cannot hold");
  }
  if (!metadata.empty()) header["__metadata__"] = metadata;
  std::set<std::string> names;
  uint64_t offset = 0;
  for (const NamedTensor& t : tensors) {
    const auto complain = [&](const std::string& what) {
      return invalid_argument("save_safetensors: tensor \"" + t.name + "\" " + what);
    };
    if (!t.tensor.defined()) return complain("is undefined");
    if (t.tensor.quantized()) return complain("is quantised; save its parts");
    const std::string_view dtype = detail::safetensors_dtype(t.tensor.dtype());
    if (dtype.empty()) {
      return complain("has a dtype that the format cannot store: " + t.tensor.describe());
    }
    if (t.name.empty() || t.name == "__metadata__" || !names.insert(t.name).second) {
      return complain("has a name that is empty, reserved or used twice");
    }
    if (!detail::is_text(t.name)) return complain("has a name that is not UTF-8");
    const uint64_t bytes = tensor_bytes(t.tensor);
    header[t.name] = {
        {"dtype", dtype},
        {"shape", std::vector<int64_t>(t.tensor.shape().begin(), t.tensor.shape().end())},
        {"data_offsets", {offset, offset + bytes}}};
    offset += bytes;
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  if (text.size() > detail::kMaxHeaderBytes) {
    return invalid_argument("save_safetensors: the header would have " +
                            std::to_string(text.size()) + " bytes; the format allows " +
                            std::to_string(detail::kMaxHeaderBytes));
  }
  return text;
}

Status write_tensors(core::FileReplacement& file, const std::vector<NamedTensor>& tensors) {
  for (const NamedTensor& t : tensors) {
    TE_FL_ASSIGN_OR_RETURN(Tensor host, on_host(t.tensor));
    file.write({host.data<char>(), static_cast<size_t>(tensor_bytes(host))});
  }
  return {};
}

}  // namespace

Result<SafetensorsFile> load_safetensors(const std::string& path) {
  File file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  if (file.fd() < 0) return io_error(path, "cannot open");
  struct stat info {};
  if (::fstat(file.fd(), &info) != 0) return io_error(path, "cannot stat");
  if (!S_ISREG(info.st_mode)) return invalid_argument(path + ": is not a regular file");
  const uint64_t size = static_cast<uint64_t>(info.st_size);
  std::vector<std::byte> prefix(std::min<uint64_t>(size, detail::kLengthBytes));
  TE_FL_RETURN_IF_ERROR(read_exactly(file.fd(), prefix.data(), prefix.size(), 0, path));
  TE_FL_ASSIGN_OR_RETURN(uint64_t length, detail::header_length(prefix, size, path));
  prefix.resize(detail::kLengthBytes + length);
  TE_FL_RETURN_IF_ERROR(read_exactly(file.fd(), prefix.data(), prefix.size(), 0, path));
  TE_FL_ASSIGN_OR_RETURN(SafetensorsHeader header, parse_safetensors_header(prefix, size, path));
  SafetensorsFile result;
  result.metadata = std::move(header.metadata);
  for (const SafetensorsEntry& entry : header.entries) {
    TE_FL_ASSIGN_OR_RETURN(Tensor tensor, read_tensor(file.fd(), entry, header.data_offset, path));
    result.tensors.push_back({entry.name, std::move(tensor)});
  }
  return result;
}

Status save_safetensors(const std::string& path, const std::vector<NamedTensor>& tensors,
                        const Metadata& metadata) {
  TE_FL_ASSIGN_OR_RETURN(std::string header, make_header(tensors, metadata));
  core::FileReplacement file(path);
  TE_FL_RETURN_IF_ERROR(file.status().wrap(path + " cannot be written"));
  const uint64_t length = header.size();
  file.write({reinterpret_cast<const char*>(&length), sizeof length});
  file.write(header);
  TE_FL_RETURN_IF_ERROR(write_tensors(file, tensors));
  return file.commit().wrap(path + " cannot be written");
}

}  // namespace te_fl::nn
