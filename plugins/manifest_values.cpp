#include "plugins/manifest_values.hpp"

#include <algorithm>

namespace te_fl::plugins {
namespace {

constexpr std::size_t kMaxNameLength = 64;
constexpr std::size_t kMaxShown = 80;

const std::string& as_text(const Json& value, std::string_view key, const std::string& rule) {
  if (!value.is_string()) {
    throw BadManifest{"\"" + std::string(key) + "\" is the " + value.type_name() + " " +
                      value_text(value) + " and must be " + rule};
  }
  const auto& text = value.get_ref<const std::string&>();
  const bool control = std::any_of(text.begin(), text.end(), [](char c) {
    return static_cast<unsigned char>(c) < 0x20 || c == 0x7f;
  });
  if (text.empty() || control) {
    throw BadManifest{
        "\"" + std::string(key) + "\" is " +
        (text.empty() ? "empty" : in_quotes(text) + ", which holds control characters,") +
        " and must be " + rule};
  }
  return text;
}

}  // namespace

std::string in_quotes(std::string_view text) {
  const bool cut = text.size() > kMaxShown;
  // error_handler_t::replace is needed since cutting the text may split a UTF-8 sequence.
  return Json(text.substr(0, kMaxShown)).dump(-1, ' ', true, Json::error_handler_t::replace) +
         (cut ? "..." : "");
}

std::string value_text(const Json& value) {
  if (value.is_string()) return in_quotes(value.get_ref<const std::string&>());
  std::string text = value.dump(-1, ' ', true, Json::error_handler_t::replace);
  return text.size() > kMaxShown ? text.substr(0, kMaxShown) + "..." : text;
}

const std::string& string_value(const Json& object, std::string_view key, const std::string& rule) {
  return as_text(object.at(std::string(key)), key, rule);
}

void refuse_value(std::string_view key, const std::string& value, const std::string& rule) {
  throw BadManifest{"\"" + std::string(key) + "\" is " + in_quotes(value) + " and must be " + rule};
}

std::string identifier(const Json& value, std::string_view key) {
  const std::string rule =
      "a string of at most " + std::to_string(kMaxNameLength) +
      " letters a-z, digits, '.', '_' and '-', beginning with a letter or digit";
  const std::string& text = as_text(value, key, rule);
  const auto plain = [](char c) { return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9'); };
  const bool good = text.size() <= kMaxNameLength && plain(text[0]) &&
                    std::all_of(text.begin(), text.end(), [&](char c) {
                      return plain(c) || c == '.' || c == '_' || c == '-';
                    });
  if (!good) refuse_value(key, text, rule);
  return text;
}

}  // namespace te_fl::plugins
