#include "plugins/library.hpp"

#include <dlfcn.h>
#include <link.h>

#include "core/base/file.hpp"

namespace te_fl::plugins {
namespace {

std::string last_error() {
  const char* text = dlerror();
  return text != nullptr ? text : "the dynamic loader gave no reason";
}

}  // namespace

Result<std::shared_ptr<Library>> Library::open(const std::string& path) {
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) return Status(StatusCode::kIncompatible, last_error());
  return std::shared_ptr<Library>(new Library(handle));
}

Library::~Library() {
  if (!keep_.load(std::memory_order_relaxed)) dlclose(handle_);
}

void* Library::symbol(const char* name) const {
  void* found = dlsym(handle_, name);
  if (found == nullptr) return nullptr;
  Dl_info where{};
  void* definer = nullptr;
  link_map* own = nullptr;
  const bool known = dladdr1(found, &where, &definer, RTLD_DL_LINKMAP) != 0 &&
                     dlinfo(handle_, RTLD_DI_LINKMAP, &own) == 0;
  return known && definer != own ? nullptr : found;
}

bool is_mapped(const std::string& path) {
  if (!core::check_regular(path).ok()) return false;  // dlopen() would open even a device or a pipe
  void* handle = dlopen(path.c_str(), RTLD_LAZY | RTLD_NOLOAD);
  if (handle == nullptr) {
    dlerror();  // clears the error
    return false;
  }
  dlclose(handle);
  return true;
}

}  // namespace te_fl::plugins
