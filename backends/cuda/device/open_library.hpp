// Opens shared libraries on first use.
#pragma once

#include <initializer_list>
#include <string>

namespace te_fl::cuda {

// Opens the first of `names` that exists, but prefers a library that the process has already
// loaded. Returns NULL if there is none; `reason` then has the loader's message about the first
// name. The library is never closed.
void* open_library(std::initializer_list<const char*> names, std::string& reason);

// The path of the library that contains a function; empty if the loader does not know it.
std::string path_of(const void* function);

}  // namespace te_fl::cuda
