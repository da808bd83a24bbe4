// A cache of compiled programs on disk: $XDG_CACHE_HOME/te_fl/opencl, or ~/.cache/te_fl/opencl.
#pragma once

#include <string>
#include <vector>

namespace te_fl::opencl {

// Returns the cached binary for `key`, a string that contains everything on which the binary
// depends. Returns an empty vector if there is no file, or if the file is damaged or belongs to
// another key.
std::vector<unsigned char> read_binary(const std::string& key);
// Stores a binary: writes a temporary file and renames it atomically. If the folder is not
// writable, does nothing; the next process then compiles the program again.
void write_binary(const std::string& key, const std::vector<unsigned char>& binary);

}  // namespace te_fl::opencl
