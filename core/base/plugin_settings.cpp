#include "core/base/plugin_settings.hpp"

#include <algorithm>
#include <charconv>

namespace te_fl::core {
namespace {

using enum VariableType;

bool plain(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) {
    return (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
  });
}

std::string variable_prefix(std::string_view plugin) {
  std::string prefix = "TE_FL_";
  for (const char c : plugin) prefix += c >= 'a' && c <= 'z' ? static_cast<char>(c - 32) : c;
  return prefix + "_";
}

// True if the text is empty or has the form "MIN MAX".
bool good_bounds(std::string_view text) {
  if (text.empty()) return true;
  int64_t low = 0, high = 0;
  const char* const end = text.data() + text.size();
  const auto first = std::from_chars(text.data(), end, low);
  if (first.ec != std::errc() || first.ptr == end || *first.ptr != ' ') return false;
  const auto second = std::from_chars(first.ptr + 1, end, high);
  return second.ec == std::errc() && second.ptr == end && low <= high;
}

Status wrong(const PluginSetting& setting, const std::string& what) {
  return Status(StatusCode::kIncompatible, "setting " + setting.name + " " + what + " (rule R21)");
}

}  // namespace

std::optional<VariableType> plugin_setting_type(std::string_view word) {
  for (const VariableType type : {kString, kBool, kInt, kEnum, kList, kFile}) {
    if (type_name(type) == word) return type;
  }
  return std::nullopt;
}

Status check_declaration(std::string_view plugin, const PluginSetting& setting) {
  const std::string prefix = variable_prefix(plugin);
  if (!setting.name.starts_with(prefix) || setting.name.size() == prefix.size() ||
      setting.name.size() > 128 || !plain(setting.name)) {
    return wrong(setting, "must begin with " + prefix +
                              " and go on with capital letters, digits and '_', 128 in all");
  }
  if (setting.doc.empty()) return wrong(setting, "has no sentence that says what it does");
  if (setting.type == kInt && !good_bounds(setting.choices)) {
    return wrong(setting, "is an int with the bounds '" + setting.choices +
                              "', which must be \"MIN MAX\", or nothing");
  }
  if (setting.type == kEnum && setting.choices.find_first_not_of(' ') == std::string::npos) {
    return wrong(setting, "is an enum without choices");
  }
  if (setting.default_value.empty()) return {};
  const VariableSpec spec{setting.name, {}, setting.type, {}, setting.choices, {}};
  const Result<std::string> checked = check_value(spec, setting.name, setting.default_value);
  if (!checked.ok()) return wrong(setting, "has a wrong default: " + checked.status().message());
  if (*checked == setting.default_value) return {};
  return wrong(setting, "has the default '" + setting.default_value + "', which is written '" +
                            *checked + "'");
}

}  // namespace te_fl::core
