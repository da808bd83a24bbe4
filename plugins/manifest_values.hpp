// Values of a manifest's JSON with the rules that they must keep. Thread-safe.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "plugins/nearest.hpp"

namespace te_fl::plugins {

using Json = nlohmann::json;

// The reason for which a manifest is refused. Thrown by readers of values; parse_manifest makes a
// ManifestResult of it.
struct BadManifest {
  std::string text;
};

// A text or value as a message shows it: as JSON writes it, cut if it is long.
std::string in_quotes(std::string_view text);
std::string value_text(const Json& value);

// The text at `key`, which the object has. Throws if that is no string, is empty, or holds control
// characters; the message ends with `rule`.
const std::string& string_value(const Json& object, std::string_view key, const std::string& rule);
// A name such as a plugin's or a vendor's: a-z, 0-9, '.', '_', '-', at most 64 letters. `key` is
// named in the message.
std::string identifier(const Json& value, std::string_view key);

[[noreturn]] void refuse_value(std::string_view key, const std::string& value,
                               const std::string& rule);
// `where` follows the key in the message: " in \"probe\"".
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
