#include "device/open_library.hpp"

#include <dlfcn.h>

namespace te_fl::cuda {

void* open_library(std::initializer_list<const char*> names, std::string& reason) {
  for (const int flags : {RTLD_NOLOAD | RTLD_NOW, RTLD_NOW | RTLD_LOCAL}) {
    for (const char* name : names) {
      if (void* handle = dlopen(name, flags)) return handle;
      if (reason.empty() && (flags & RTLD_NOLOAD) == 0) reason = dlerror();
    }
  }
  return nullptr;
}

std::string path_of(const void* function) {
  Dl_info info{};
  const bool known = dladdr(function, &info) != 0 && info.dli_fname != nullptr;
  return known ? info.dli_fname : "";
}

}  // namespace te_fl::cuda
