#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "te_fl/status.hpp"

// Whole files: read, and replaced so that nobody ever sees half of one. Thread-safe.
namespace te_fl::core {

// The bytes of a regular file. Errors: NOT_FOUND (no such file); FAILED_PRECONDITION with a reason
// that fits behind "the file PATH ": a folder, a pipe or device (which is not waited for), more
// than `most` bytes, no permission, an I/O error.
Result<std::string> read_file(const std::string& path, uint64_t most);
// 128 bits of FNV-1a in hex digits, by which ranks compare what they have read: nobody forges
// anything.
std::string contents_hash(std::string_view contents);
// FAILED_PRECONDITION, "PATH is a folder", or "is a device, a pipe or a socket", to which opening
// would wait for somebody or do something. OK: it is a regular file, or what opening says better.
Status check_regular(const std::string& path);

// Collects what a file is to hold, and puts it in the file's place when it is complete: written
// beside the file, synchronised with the disk, renamed, which is synchronised too. Until then, and
// if anything fails, the file is as it was. A symbolic link stays, and the file that it leads to is
// replaced, or made. What is there and is no regular file (a device, a pipe) is refused. One thread
// at a time.
class FileReplacement {
 public:
  explicit FileReplacement(const std::string& path);
  ~FileReplacement();  // removes what was not committed
  FileReplacement(const FileReplacement&) = delete;
  FileReplacement& operator=(const FileReplacement&) = delete;

  // FAILED_PRECONDITION, and why no file can be put there, once something has failed.
  Status status() const;
  // Errors are kept for commit().
  void write(std::string_view text);
  // FAILED_PRECONDITION: why the file could not be written, in the system's words.
  Status commit();

 private:
  void flush();
  void put(std::string_view text);
  void fail(const std::string& reason);

  std::string path_, temporary_, buffer_, error_;
  int fd_ = -1;
};

// Replaces a file by `text`; see FileReplacement.
Status replace_file(const std::string& path, std::string_view text);

}  // namespace te_fl::core
