#pragma once

#include <string>
#include <vector>

namespace te_fl::plugins {

// The trimmed words of a comma separated list, empty ones left out.
std::vector<std::string> split_list(const std::string& text);

}  // namespace te_fl::plugins
