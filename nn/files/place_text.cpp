#include "nn/files/place_text.hpp"

#include <charconv>

namespace te_fl::nn::detail {

std::string list_text(std::span<const int64_t> values) {
  std::string text;
  for (size_t i = 0; i < values.size(); ++i) text += (i > 0 ? "," : "") + std::to_string(values[i]);
  return text;
}

bool parse_list(std::string_view text, Shape& values) {
  while (!text.empty()) {
    int64_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || value < 0) return false;
    values.push_back(value);
    text.remove_prefix(static_cast<size_t>(end - text.data()));
    if (text.empty()) return true;
    if (text.front() != ',' || text.size() == 1) return false;
    text.remove_prefix(1);
  }
  return true;
}

std::string parameter_name(const std::string& name) {
  constexpr std::string_view kOptimizer = "optimizer.";
  if (!name.starts_with(kOptimizer)) return name;
  const size_t dot = name.find('.', kOptimizer.size());
  return dot == name.npos ? name : name.substr(dot + 1);
}

}  // namespace te_fl::nn::detail
