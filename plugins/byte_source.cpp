#include "plugins/byte_source.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace te_fl::plugins {

ByteSource::ByteSource(const std::string& path) {
  // An embedded NUL would make the kernel open another file than the one that messages name.
  if (path.find('\0') != std::string::npos) {
    state_ = FileState::kMissing;
    error_ = "the path contains a NUL byte";
    return;
  }
  fd_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  struct stat st {};
  if (fd_ < 0 || ::fstat(fd_, &st) != 0) {
    const int code = errno;
    const bool absent = code == ENOENT || code == ENOTDIR;
    state_ = absent ? FileState::kMissing : FileState::kUnreadable;
    error_ = std::strerror(code);
    return;
  }
  if (S_ISDIR(st.st_mode)) {
    state_ = FileState::kFolder;
    error_ = "is a folder";
  } else if (!S_ISREG(st.st_mode)) {
    state_ = FileState::kSpecial;
    error_ = "is a device, pipe or socket";
  } else {
    size_ = static_cast<std::uint64_t>(st.st_size);
  }
}

ByteSource::~ByteSource() {
  if (fd_ >= 0) ::close(fd_);
}

bool ByteSource::read_raw(std::uint64_t offset, std::uint64_t count, void* out) const {
  if (!contains(offset, count)) return false;
  if (count == 0) return true;
  if (fd_ < 0) {
    std::memcpy(out, memory_.data() + offset, count);
    return true;
  }
  auto* at = static_cast<std::uint8_t*>(out);
  while (count > 0) {
    const ssize_t got = ::pread(fd_, at, count, static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;  // shrank since it was opened, or an I/O error
    at += got;
    offset += static_cast<std::uint64_t>(got);
    count -= static_cast<std::uint64_t>(got);
  }
  return true;
}

bool ByteSource::read(std::uint64_t offset, std::uint64_t count,
                      std::vector<std::uint8_t>& out) const {
  out.clear();
  if (count > kMaxRead || !contains(offset, count)) return false;
  out.resize(count);
  if (read_raw(offset, count, out.data())) return true;
  out.clear();
  return false;
}

std::vector<std::uint8_t> ByteSource::read_some(std::uint64_t offset, std::uint64_t count) const {
  std::vector<std::uint8_t> out;
  if (offset < size_) read(offset, std::min({count, size_ - offset, kMaxRead}), out);
  return out;
}

}  // namespace te_fl::plugins
