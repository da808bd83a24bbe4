#include "plugins/split_list.hpp"

#include <algorithm>
#include <string_view>

#include "core/base/text.hpp"

namespace te_fl::plugins {

std::vector<std::string> split_list(const std::string& text) {
  std::vector<std::string> out;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    const auto word = core::trim(std::string_view(text).substr(begin, end - begin));
    if (!word.empty()) out.emplace_back(word);
    begin = end + 1;
  }
  return out;
}

}  // namespace te_fl::plugins
