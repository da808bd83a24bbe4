// Random access to the bytes of a file or of a buffer, every access checked against the size.
#pragma once

#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

namespace te_fl::plugins {

// The kind of file at a path when it was opened. Only kRegular can be read.
enum class FileState { kRegular, kMissing, kUnreadable, kFolder, kSpecial };

// Reads with pread instead of mapping the file: a file that somebody truncates while it is being
// read then gives a short read, not SIGBUS. Not copyable; reading is thread-safe.
class ByteSource {
 public:
  // Opens without blocking on a FIFO, and without making a terminal the controlling one.
  explicit ByteSource(const std::string& path);
  // Borrows `bytes`; they must outlive this object.
  explicit ByteSource(std::span<const std::uint8_t> bytes) : memory_(bytes), size_(bytes.size()) {}
  ~ByteSource();
  ByteSource(const ByteSource&) = delete;
  ByteSource& operator=(const ByteSource&) = delete;

  FileState state() const { return state_; }
  // For a state other than kRegular: the system's error text, for example "Permission denied".
  const std::string& error() const { return error_; }
  std::uint64_t size() const { return size_; }
  // File descriptor, or -1 for a buffer. Stays owned by this object.
  int fd() const { return fd_; }

  // True if [offset, offset + count) lies inside; does not overflow.
  bool contains(std::uint64_t offset, std::uint64_t count) const {
    return offset <= size_ && count <= size_ - offset;
  }
  // Fills `out` with exactly `count` bytes, or returns false and leaves it empty. Refuses more than
  // kMaxRead bytes, so a forged size field costs no memory.
  bool read(std::uint64_t offset, std::uint64_t count, std::vector<std::uint8_t>& out) const;
  // Reads up to `count` bytes, fewer at the end.
  std::vector<std::uint8_t> read_some(std::uint64_t offset, std::uint64_t count) const;

  template <class T>
  bool read_object(std::uint64_t offset, T& out) const {
    return read_raw(offset, sizeof(T), &out);
  }

  static constexpr std::uint64_t kMaxRead = std::uint64_t{256} << 20;

 private:
  bool read_raw(std::uint64_t offset, std::uint64_t count, void* out) const;

  std::span<const std::uint8_t> memory_;
  std::uint64_t size_ = 0;
  int fd_ = -1;
  FileState state_ = FileState::kRegular;
  std::string error_;
};

// Copies a T out of `bytes` at `offset`; false when it does not fit.
template <class T>
bool get_object(std::span<const std::uint8_t> bytes, std::uint64_t offset, T& out) {
  if (offset > bytes.size() || bytes.size() - offset < sizeof(T)) return false;
  std::memcpy(&out, bytes.data() + offset, sizeof(T));
  return true;
}

}  // namespace te_fl::plugins
