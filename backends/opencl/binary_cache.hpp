// A cache of compiled programs on disk: $XDG_CACHE_HOME/te_fl/opencl, or ~/.cache/te_fl/opencl.
#pragma once

#include <string>
#include <vector>

namespace te_fl::opencl {

// `key`: everything on which the binary depends. Returns an empty vector if there is no such file,
// if it is damaged, or if it has another key.
std::vector<unsigned char> read_binary(const std::string& key);
// Writes a temporary file and renames it atomically. Ignores a folder that is not writable: the
// program is then compiled again in the next process.
void write_binary(const std::string& key, const std::vector<unsigned char>& binary);

}  // namespace te_fl::opencl
