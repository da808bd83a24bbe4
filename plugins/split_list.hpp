#pragma once

#include <string>
#include <vector>

namespace te_fl::plugins {

// Splits a comma-separated list into trimmed words; drops empty ones.
std::vector<std::string> split_list(const std::string& text);

}  // namespace te_fl::plugins
