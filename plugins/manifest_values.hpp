// Reads and validates values of a manifest's JSON. Thread-safe.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "plugins/nearest.hpp"

namespace te_fl::plugins {

using Json = nlohmann::json;

// An exception with the reason for rejecting a manifest. The readers of values throw it;
// parse_manifest converts it into a ManifestResult.
struct BadManifest {
  std::string text;
};

// Quote a text or a value for a message, in JSON syntax and shortened if it is long.
std::string in_quotes(std::string_view text);
std::string value_text(const Json& value);

// The text at `key`, which must exist. Throws if it is not a string, is empty, or contains control
// characters; the message ends with `rule`.
const std::string& string_value(const Json& object, std::string_view key, const std::string& rule);
// A name, such as that of a plugin or vendor: a-z, 0-9, '.', '_', '-', at most 64 characters. The
// message contains `key`.
std::string identifier(const Json& value, std::string_view key);

[[noreturn]] void refuse_value(std::string_view key, const std::string& value,
                               const std::string& rule);
// Throws for an unknown key. `where` follows the key in the message: " in \"probe\"".
template <class Keys>
[[noreturn]] void refuse_key(const std::string& key, const Keys& keys, const std::string& where) {
  std::string text = "unknown key " + in_quotes(key) + where;
  const std::string near = nearest_name(key, keys);
  if (!near.empty()) throw BadManifest{text + "; did you mean \"" + near + "\"?"};
  text += "; the keys are";
  for (const std::string_view k : keys) text += (k == keys.front() ? " " : ", ") + std::string(k);
  throw BadManifest{text};
}

}  // namespace te_fl::plugins
