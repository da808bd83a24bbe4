// A shared library opened for a plugin.
#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "te_fl/status.hpp"

namespace te_fl::plugins {

// Closes the library when destroyed, unless keep_mapped() was called. Thread-safe.
class Library {
 public:
  // Opens with RTLD_NOW | RTLD_LOCAL. The error has the dynamic loader's text.
  static Result<std::shared_ptr<Library>> open(const std::string& path);
  ~Library();
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

  // Null if the library itself does not define the symbol; symbols of its dependencies do not
  // count.
  void* symbol(const char* name) const;
  void keep_mapped() noexcept { keep_.store(true, std::memory_order_relaxed); }

 private:
  explicit Library(void* handle) noexcept : handle_(handle) {}
  void* handle_;
  std::atomic<bool> keep_{false};
};

// True if the dynamic loader has the file mapped now.
bool is_mapped(const std::string& path);

}  // namespace te_fl::plugins
