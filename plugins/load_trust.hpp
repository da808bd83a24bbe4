// Finds files that others could change among those that the dynamic loader maps for a plugin.
#pragma once

#include <string>

#include "plugins/library_search.hpp"

namespace te_fl::plugins {

// Follows the libraries that the one at `path` needs, as the loader would look for them, and judges
// every file that it would meet and every RPATH and RUNPATH folder in which it would look
// (file_trust.hpp). What cannot be read or found is left to the loader. Libraries that the process
// has mapped already are not judged. Empty: nobody else could. Otherwise who, where, and the
// command that mends it. Thread-safe.
std::string load_trust_problem(const std::string& path, const SearchRules& rules);

}  // namespace te_fl::plugins
