// Compiled programs on disk: $XDG_CACHE_HOME/te_fl/opencl, or ~/.cache/te_fl/opencl.
#pragma once

#include <string>
#include <vector>

namespace te_fl::opencl {

// `key`: everything that the binary depends on. Empty if there is no such file, or if it is
// damaged or another key's.
std::vector<unsigned char> read_binary(const std::string& key);
// By a temporary file and an atomic rename. A folder that cannot be written is no error: the
// program is compiled again next time.
void write_binary(const std::string& key, const std::vector<unsigned char>& binary);

}  // namespace te_fl::opencl
