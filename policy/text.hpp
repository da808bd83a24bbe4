#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "core/text.hpp"

namespace te_fl::policy {

using core::did_you_mean;
using core::lower;
using core::trim;

// The trimmed parts between separators; one empty part for an empty text.
inline std::vector<std::string_view> split(std::string_view s, char separator) {
  std::vector<std::string_view> parts;
  while (true) {
    const size_t end = s.find(separator);
    parts.push_back(trim(s.substr(0, end)));
    if (end == std::string_view::npos) return parts;
    s.remove_prefix(end + 1);
  }
}

inline std::string quoted(std::string_view s) { return "'" + std::string(s) + "'"; }

}  // namespace te_fl::policy
