#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "te_fl/status.hpp"

// Reads whole files, and replaces files atomically. Thread-safe.
namespace te_fl::core {

// Returns the bytes of a regular file. Errors: NOT_FOUND (no such file); FAILED_PRECONDITION for a
// folder, a pipe or a device (it does not block on those), more than `most` bytes, no permission or
// an I/O error. The message fits behind "the file PATH ".
Result<std::string> read_file(const std::string& path, uint64_t most);
// A 128-bit FNV-1a hash as hex digits, by which ranks compare the files that they have read. It
// does not protect against forgery.
std::string contents_hash(std::string_view contents);
// FAILED_PRECONDITION if the path is a folder, a device, a pipe or a socket, since opening such a
// file could block or have side effects. OK for a regular file, and for a path whose error open()
// will report.
Status check_regular(const std::string& path);

// Replaces a file atomically. Collects the contents in a temporary file in the same folder;
// commit() syncs that file, renames it to the path and syncs the folder. Until then, and after any
// error, the old file is unchanged. A symbolic link is kept: the file that it points to is replaced
// or created. A path that is a device or a pipe is refused. Not thread-safe.
class FileReplacement {
 public:
  explicit FileReplacement(const std::string& path);
  ~FileReplacement();  // removes the temporary file if it was not committed
  FileReplacement(const FileReplacement&) = delete;
  FileReplacement& operator=(const FileReplacement&) = delete;

  // OK until an operation fails, then FAILED_PRECONDITION with the reason.
  Status status() const;
  // Appends text. Errors are reported by commit().
  void write(std::string_view text);
  // Replaces the file by the new contents. FAILED_PRECONDITION: the file could not be written, with
  // the system's error text.
  Status commit();

 private:
  void flush();
  void put(std::string_view text);
  void fail(const std::string& reason);

  std::string path_, temporary_, buffer_, error_;
  int fd_ = -1;
};

// Replaces the contents of a file by `text`; see FileReplacement.
Status replace_file(const std::string& path, std::string_view text);

}  // namespace te_fl::core
