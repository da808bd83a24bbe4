#include "core/base/file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>

namespace te_fl::core {
namespace {

constexpr size_t kBuffered = size_t{1} << 20;

// Describes the kind of a path that is not a regular file.
const char* kind_name(mode_t mode) {
  return S_ISDIR(mode) ? "is a folder" : "is a device, a pipe or a socket";
}

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

// Makes a rename durable. Some file systems cannot sync a folder; the file is complete in either
// case.
void sync_parent_folder(const std::string& path) {
  const std::string folder = std::filesystem::path(path).parent_path().string();
  const Descriptor file(
      ::open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (file.get() >= 0) (void)::fsync(file.get());
}

// Follows symbolic links to the file that `path` names; that file need not exist.
std::string resolve_links(const std::string& path) {
  const std::unique_ptr<char, decltype(&std::free)> real(::realpath(path.c_str(), nullptr),
                                                         &std::free);
  if (real != nullptr) return real.get();
  constexpr int kMaxLinks = 40;  // the limit of Linux
  std::filesystem::path target = path;
  std::error_code error;
  for (int i = 0; i < kMaxLinks && std::filesystem::is_symlink(target, error); ++i) {
    const auto next = std::filesystem::read_symlink(target, error);
    if (error) break;
    target = target.parent_path() / next;
  }
  return target.string();
}

// A temporary file name in the same folder, unique among processes and calls. A long name is cut,
// since file names have at most 255 bytes.
std::string name_beside(const std::string& path) {
  static std::atomic<unsigned> number{0};
  const std::string end =
      "." + std::to_string(::getpid()) + "." + std::to_string(number++) + ".part";
  const size_t slash = path.rfind('/'), name = slash == std::string::npos ? 0 : slash + 1;
  return path.substr(0, std::min(path.size(), name + NAME_MAX - end.size())) + end;
}

}  // namespace

std::string contents_hash(std::string_view contents) {
  using Wide = unsigned __int128;
  Wide hash = Wide{0x6c62272e07bb0142} << 64 | 0x62b821756295c58d;
  constexpr Wide kPrime = Wide{1} << 88 | 0x13b;
  for (const char c : contents) hash = (hash ^ static_cast<unsigned char>(c)) * kPrime;
  std::string out;
  for (int shift = 124; shift >= 0; shift -= 4) {
    out += "0123456789abcdef"[static_cast<unsigned>(hash >> shift) & 15];
  }
  return out;
}

Result<std::string> read_file(const std::string& path, uint64_t most) {
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  struct stat st {};
  if (file.get() < 0 || ::fstat(file.get(), &st) != 0) {
    const bool absent = errno == ENOENT || errno == ENOTDIR;
    const std::string why = "cannot be read: " + std::string(std::strerror(errno));
    return absent ? not_found(why) : failed_precondition(why);
  }
  if (!S_ISREG(st.st_mode)) return failed_precondition(kind_name(st.st_mode));
  if (static_cast<uint64_t>(st.st_size) > most) {
    return failed_precondition("has " + std::to_string(st.st_size) + " bytes, and may have " +
                               std::to_string(most));
  }
  std::string text(static_cast<size_t>(st.st_size), '\0');
  size_t have = 0;
  while (have < text.size()) {
    const ssize_t got = ::read(file.get(), text.data() + have, text.size() - have);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      return failed_precondition("cannot be read: " + std::string(std::strerror(errno)));
    }
    if (got == 0) break;  // the file became shorter while it was read
    have += static_cast<size_t>(got);
  }
  text.resize(have);
  return text;
}

Status check_regular(const std::string& path) {
  struct stat st {};
  if (::stat(path.c_str(), &st) != 0 || S_ISREG(st.st_mode)) return {};
  return failed_precondition(path + " " + kind_name(st.st_mode) + "; name a regular file");
}

FileReplacement::FileReplacement(const std::string& path)
    : path_(resolve_links(path)), temporary_(name_beside(path_)) {
  struct stat st {};
  const bool there = ::stat(path_.c_str(), &st) == 0;
  if (there ? !S_ISREG(st.st_mode) : errno != ENOENT) {
    fail(there ? kind_name(st.st_mode) : std::strerror(errno));
    return;
  }
  ::unlink(temporary_.c_str());  // left by an earlier process with the same process id
  fd_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (fd_ < 0) fail(std::strerror(errno));
}

FileReplacement::~FileReplacement() {
  if (fd_ < 0) return;
  ::close(fd_);
  ::unlink(temporary_.c_str());
}

void FileReplacement::fail(const std::string& reason) {
  if (error_.empty()) error_ = reason;
}

Status FileReplacement::status() const {
  return error_.empty() ? Status() : failed_precondition(error_);
}

void FileReplacement::write(std::string_view text) {
  if (buffer_.size() + text.size() > kBuffered) flush();
  if (text.size() > kBuffered) return put(text);  // writes a large text without buffering it
  if (error_.empty()) buffer_ += text;
}

void FileReplacement::flush() {
  put(buffer_);
  buffer_.clear();
}

void FileReplacement::put(std::string_view text) {
  while (!text.empty() && error_.empty()) {
    const ssize_t done = ::write(fd_, text.data(), text.size());
    if (done > 0) {
      text.remove_prefix(static_cast<size_t>(done));
    } else if (done == 0 || errno != EINTR) {
      fail(done == 0 ? "nothing more can be written" : std::strerror(errno));
    }
  }
}

Status FileReplacement::commit() {
  flush();
  // Without fsync, a crash of the machine could leave the new name with no contents.
  if (error_.empty() && ::fsync(fd_) != 0) fail(std::strerror(errno));
  if (error_.empty() && ::rename(temporary_.c_str(), path_.c_str()) != 0) {
    fail(std::strerror(errno));
  }
  if (!error_.empty()) return status();
  ::close(fd_);
  fd_ = -1;
  sync_parent_folder(path_);
  return {};
}

Status replace_file(const std::string& path, std::string_view text) {
  FileReplacement file(path);
  file.write(text);
  return file.commit();
}

}  // namespace te_fl::core
