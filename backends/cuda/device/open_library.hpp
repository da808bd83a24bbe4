// Shared libraries that are opened when they are first needed.
#pragma once

#include <initializer_list>
#include <string>

namespace te_fl::cuda {

// The first of `names` that is there: one that the process holds already before any that has to be
// loaded. NULL if there is none; `reason` then has the loader's words about the first. It is never
// closed.
void* open_library(std::initializer_list<const char*> names, std::string& reason);

// The file that a function of such a library came from; empty if the loader does not know.
std::string path_of(const void* function);

}  // namespace te_fl::cuda
