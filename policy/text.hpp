#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "core/base/text.hpp"
#include "te_fl/status.hpp"

namespace te_fl::policy {

using core::did_you_mean;
using core::lower;
using core::trim;

// Splits a text and trims the parts. An empty text yields one empty part.
inline std::vector<std::string_view> split(std::string_view s, char separator) {
  std::vector<std::string_view> parts;
  while (true) {
    const size_t end = s.find(separator);
    parts.push_back(trim(s.substr(0, end)));
    if (end == std::string_view::npos) return parts;
    s.remove_prefix(end + 1);
  }
}

// An error about a setting on one line: the mistake first, then its effect, since users look for
// the mistake and many programs show the first line only.
inline Status cause_first(const Status& cause, const std::string& effect) {
  return Status(cause.code(), cause.message() + "; " + effect, cause.cause());
}
// Prefixes the error with the setting: "TE_FL_PER_OP=x: ..."
inline Status in_setting(const std::string& setting, const Status& cause) {
  return Status(cause.code(), setting + ": " + cause.message(), cause.cause());
}

inline std::string quoted(std::string_view s) { return "'" + std::string(s) + "'"; }

}  // namespace te_fl::policy
