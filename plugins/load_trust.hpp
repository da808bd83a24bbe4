// Checks whether other users could change any file that the dynamic loader maps for a plugin.
#pragma once

#include <string>

#include "plugins/library_search.hpp"

namespace te_fl::plugins {

// Checks the libraries that the library at `path` needs, in the way of the loader: every file that
// it would try and every RPATH and RUNPATH folder that it would search (file_trust.hpp). Ignores
// files that cannot be found or read, and libraries that the process has mapped already. Returns an
// empty text if no other user could change anything; otherwise who could, where, and the command
// that corrects this. Thread-safe.
std::string load_trust_problem(const std::string& path, const SearchRules& rules);

}  // namespace te_fl::plugins
