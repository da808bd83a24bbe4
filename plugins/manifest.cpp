#include "plugins/manifest.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <filesystem>
#include <set>

#include "plugins/byte_source.hpp"
#include "plugins/file_trust.hpp"
#include "plugins/manifest_values.hpp"
#include "plugins/nearest.hpp"

namespace te_fl::plugins {
namespace {

constexpr std::string_view kFormatVersion = "1.0";
constexpr auto kKeys = std::to_array<std::string_view>(
    {"file_format_version", "name", "vendor", "library_path", "arch", "abi", "probe", "load_for",
     "settings", "vendor_aliases", "packages"});
constexpr std::size_t kRequiredKeys = 6;  // the first six
constexpr auto kSettingKeys =
    std::to_array<std::string_view>({"name", "type", "default", "choices", "doc"});
constexpr auto kPackageKeys = std::to_array<std::string_view>({"soname", "apt", "note", "pypi"});
constexpr auto kProbeKeys =
    std::to_array<std::string_view>({"pci_vendor", "device_node", "always"});
constexpr auto kArchitectures = std::to_array<std::string_view>(
    {"x86_64", "aarch64", "riscv64", "ppc64le", "s390x", "loongarch64"});

std::string position(std::string_view text, std::size_t byte) {
  byte = std::min(byte, text.size());
  std::size_t line = 1;
  std::size_t column = 1;
  for (const char c : text.substr(0, byte)) {
    column = c == '\n' ? 1 : column + 1;
    line += c == '\n' ? 1 : 0;
  }
  return std::to_string(line) + ":" + std::to_string(column);
}

// Rejects input that the JSON library accepts silently: repeated keys and deep nesting. Called for
// every parse event.
class ParseGuard {
 public:
  bool operator()(int depth, Json::parse_event_t event, Json& value) {
    using Event = Json::parse_event_t;
    if (event == Event::object_start || event == Event::array_start) {
      if (depth >= kMaxManifestDepth) {
        throw BadManifest{"nested deeper than " + std::to_string(kMaxManifestDepth) + " levels"};
      }
      if (event == Event::object_start) {
        keys_.resize(static_cast<std::size_t>(depth) + 1);
        keys_.back().clear();
      }
    } else if (event == Event::key) {
      const auto& key = value.get_ref<const std::string&>();
      const auto level = static_cast<std::size_t>(depth) - 1;
      if (level < keys_.size() && !keys_[level].insert(key).second) {
        throw BadManifest{"key " + in_quotes(key) + " appears twice; leave one out"};
      }
    }
    return true;
  }

 private:
  std::vector<std::set<std::string>> keys_;
};

std::string library_path(const Json& object, const std::string& manifest_path) {
  const std::string& text =
      string_value(object, "library_path",
                   "a string: an absolute path, or one relative to the manifest's folder");
  if (text.ends_with('/'))
    refuse_value("library_path", text, "the path of a file, not of a folder");
  // The path is not normalised: after a symbolic link, "folder/.." need not be the folder's lexical
  // parent.
  return (std::filesystem::path(manifest_path).parent_path() / text).string();
}

std::string architecture(const Json& object) {
  std::string rule = "one of";
  for (const std::string_view a : kArchitectures) rule += " " + std::string(a);
  const std::string& text = string_value(object, "arch", rule);
  if (std::find(kArchitectures.begin(), kArchitectures.end(), text) != kArchitectures.end()) {
    return text;
  }
  std::string near = text == "amd64" || text == "x64" ? "x86_64"
                     : text == "arm64"                ? "aarch64"
                                                      : nearest_name(text, kArchitectures);
  refuse_value("arch", text, near.empty() ? rule : rule + "; did you mean \"" + near + "\"?");
}

void abi_version(const Json& object, Manifest& out) {
  const std::string rule = "a string MAJOR.MINOR such as \"0.1\"";
  const std::string& text = string_value(object, "abi", rule);
  const char* end = text.data() + text.size();
  const auto major = std::from_chars(text.data(), end, out.abi_major);
  if (major.ec != std::errc() || major.ptr == end || *major.ptr != '.') {
    refuse_value("abi", text, rule);
  }
  const auto minor = std::from_chars(major.ptr + 1, end, out.abi_minor);
  if (minor.ec != std::errc() || minor.ptr != end || out.abi_major < 0 || out.abi_minor < 0) {
    refuse_value("abi", text, rule);
  }
}

std::uint16_t pci_vendor(const Json& probe) {
  const std::string rule = "a string of 0x and four hex digits, such as \"0x10de\"";
  const std::string& text = string_value(probe, "pci_vendor", rule);
  std::uint16_t id = 0;
  const char* end = text.data() + text.size();
  if (text.size() != 6 || !text.starts_with("0x")) refuse_value("pci_vendor", text, rule);
  const auto parsed = std::from_chars(text.data() + 2, end, id, 16);
  if (parsed.ec != std::errc() || parsed.ptr != end) refuse_value("pci_vendor", text, rule);
  return id;
}

Probe parse_probe(const Json& value) {
  const std::string rule = "an object with pci_vendor, device_node or always";
  if (!value.is_object() || value.empty()) {
    throw BadManifest{"\"probe\" is " +
                      (value.is_object() ? "an empty object" : value_text(value)) +
                      " and must be " + rule + "; leave it out for a plugin that always applies"};
  }
  Probe out;
  for (const auto& [key, item] : value.items()) {
    if (key == "pci_vendor") {
      out.pci_vendor = pci_vendor(value);
    } else if (key == "device_node") {
      const std::string node_rule = "the absolute path of a node below /dev, without \"..\"";
      out.device_node = string_value(value, key, node_rule);
      if (!out.device_node.starts_with("/dev/") ||
          out.device_node.find("..") != std::string::npos) {
        refuse_value(key, out.device_node, node_rule);
      }
    } else if (key == "always") {
      if (item != true) {
        throw BadManifest{"\"always\" is " + value_text(item) +
                          " and must be true, or be left out"};
      }
      out.always = true;
    } else {
      refuse_key(key, kProbeKeys, " in \"probe\"");
    }
  }
  return out;
}

std::vector<Device> load_for(const Json& value) {
  const std::string rule =
      "a list of types of devices without their numbers, such as [\"opencl\"] or [\"ext:acme\"], "
      "or "
      "[\"communicators\"] for communicators of hosts";
  if (!value.is_array() || value.empty()) {
    throw BadManifest{"\"load_for\" is " + value_text(value) + " and must be " + rule};
  }
  std::vector<Device> out;
  for (const Json& item : value) {
    if (!item.is_string())
      throw BadManifest{"\"load_for\" has " + value_text(item) + " and must be " + rule};
    const auto& text = item.get_ref<const std::string&>();
    if (text == "communicators") {
      out.push_back(Device{});
      continue;
    }
    const Result<Device> device = parse_device(text);
    const bool numbered =
        std::count(text.begin(), text.end(), ':') != (text.starts_with("ext:") ? 1 : 0);
    if (!device.ok() || numbered || device->is_host()) {
      throw BadManifest{"\"load_for\" has " + in_quotes(text) + " and must be " + rule +
                        (device.ok() ? "" : ": " + device.status().message())};
    }
    out.push_back(*device);
  }
  return out;
}

core::PluginSetting parse_setting(const Json& value, const std::string& plugin) {
  if (!value.is_object()) {
    throw BadManifest{"a setting is " + value_text(value) + " and must be an object {...}"};
  }
  for (const auto& item : value.items()) {
    if (std::find(kSettingKeys.begin(), kSettingKeys.end(), item.key()) == kSettingKeys.end()) {
      refuse_key(item.key(), kSettingKeys, " in \"settings\"");
    }
  }
  const auto text = [&](std::string_view key, bool required) {
    const std::string name(key);
    if (!value.contains(name) && required) {
      throw BadManifest{"key \"" + name + "\" is missing in \"settings\""};
    }
    if (!value.contains(name) || value.at(name) == "") return std::string();
    return string_value(value, key, "a string");
  };
  core::PluginSetting out;
  out.name = text("name", true);
  const std::string rule = "one of string bool int enum list file";
  const std::string type = text("type", true);
  const std::optional<core::VariableType> known = core::plugin_setting_type(type);
  if (!known) refuse_value("type", type, rule);
  out.type = *known;
  out.default_value = text("default", false);
  out.choices = text("choices", false);
  out.doc = text("doc", true);
  const Status status = core::check_declaration(plugin, out);
  if (!status.ok()) throw BadManifest{status.message()};
  return out;
}

std::vector<core::PluginSetting> parse_settings(const Json& value, const std::string& plugin) {
  if (!value.is_array()) {
    throw BadManifest{"\"settings\" is " + value_text(value) + " and must be a list [...]"};
  }
  std::vector<core::PluginSetting> out;
  for (const Json& item : value) {
    core::PluginSetting setting = parse_setting(item, plugin);
    for (const core::PluginSetting& other : out) {
      if (other.name == setting.name) throw BadManifest{"setting " + other.name + " appears twice"};
    }
    out.push_back(std::move(setting));
  }
  return out;
}

std::vector<std::string> vendor_aliases(const Json& value) {
  const std::string rule = "a list of other names of the vendor, such as [\"acme-inc\"]";
  if (!value.is_array() || value.empty()) {
    throw BadManifest{"\"vendor_aliases\" is " + value_text(value) + " and must be " + rule};
  }
  std::vector<std::string> out;
  for (const Json& item : value) out.push_back(identifier(item, "vendor_aliases"));
  return out;
}

LibraryPackage parse_package(const Json& value) {
  if (!value.is_object()) {
    throw BadManifest{"a package is " + value_text(value) + " and must be an object {...}"};
  }
  for (const auto& item : value.items()) {
    if (std::find(kPackageKeys.begin(), kPackageKeys.end(), item.key()) == kPackageKeys.end()) {
      refuse_key(item.key(), kPackageKeys, " in \"packages\"");
    }
  }
  const auto text = [&](const std::string& key) {
    return value.contains(key) ? string_value(value, key, "a text that is not empty")
                               : std::string();
  };
  const LibraryPackage out{text("soname"), text("apt"), text("note"), text("pypi")};
  if (out.soname.empty()) throw BadManifest{"key \"soname\" is missing in \"packages\""};
  if (out.apt.empty() && out.note.empty() && out.pypi.empty()) {
    throw BadManifest{"the package of " + in_quotes(out.soname) +
                      " has none of apt, note and pypi; give one, or leave the package out"};
  }
  return out;
}

std::vector<LibraryPackage> parse_packages(const Json& value) {
  if (!value.is_array()) {
    throw BadManifest{"\"packages\" is " + value_text(value) + " and must be a list [...]"};
  }
  std::vector<LibraryPackage> out;
  for (const Json& item : value) {
    LibraryPackage package = parse_package(item);
    for (const LibraryPackage& other : out) {
      if (other.soname == package.soname) {
        throw BadManifest{"the package of " + in_quotes(other.soname) + " appears twice"};
      }
    }
    out.push_back(std::move(package));
  }
  return out;
}

Manifest from_json(const Json& object, const std::string& path) {
  if (!object.is_object()) {
    throw BadManifest{"it is " + value_text(object) + " and must be an object {...}"};
  }
  // Checks the version first, since a newer format may have other keys.
  const std::string version_key(kKeys[0]);
  if (object.contains(version_key)) {
    const std::string rule = "the string \"" + std::string(kFormatVersion) + "\"";
    const std::string& version = string_value(object, version_key, rule);
    if (version != kFormatVersion) refuse_value(version_key, version, rule);
  }
  if (object.contains("sha256")) {
    throw BadManifest{
        "key \"sha256\" is not part of the format any more: leave it out; a library that others "
        "may "
        "write to is refused instead"};
  }
  for (const auto& item : object.items()) {
    if (std::find(kKeys.begin(), kKeys.end(), item.key()) == kKeys.end()) {
      refuse_key(item.key(), kKeys, "");
    }
  }
  for (std::size_t i = 0; i < kRequiredKeys; ++i) {
    if (!object.contains(std::string(kKeys[i]))) {
      throw BadManifest{"key \"" + std::string(kKeys[i]) + "\" is missing"};
    }
  }
  Manifest out;
  out.path = path;
  out.name = identifier(object.at("name"), "name");
  out.vendor = identifier(object.at("vendor"), "vendor");
  out.library_path = library_path(object, path);
  out.arch = architecture(object);
  abi_version(object, out);
  if (object.contains("probe")) out.probe = parse_probe(object.at("probe"));
  if (object.contains("load_for")) out.load_for = load_for(object.at("load_for"));
  if (object.contains("settings")) out.settings = parse_settings(object.at("settings"), out.name);
  if (object.contains("vendor_aliases")) {
    out.vendor_aliases = vendor_aliases(object.at("vendor_aliases"));
  }
  if (object.contains("packages")) out.packages = parse_packages(object.at("packages"));
  return out;
}

ManifestResult refused(std::string error) {
  ManifestResult out;
  out.error = std::move(error);
  return out;
}

std::string too_large(const std::string& path, std::uint64_t size) {
  return path + ": it has " + std::to_string(size) + " bytes, and a manifest has at most " +
         std::to_string(kMaxManifestBytes);
}

}  // namespace

ManifestResult parse_manifest(std::string_view text, const std::string& path) {
  if (text.size() > kMaxManifestBytes) return refused(too_large(path, text.size()));
  if (text.find_first_not_of(" \t\r\n") == text.npos) return refused(path + ": it is empty");
  try {
    ManifestResult out;
    out.manifest = from_json(Json::parse(text, ParseGuard()), path);
    return out;
  } catch (const BadManifest& refusal) {
    return refused(path + ": " + refusal.text);
  } catch (const Json::parse_error& error) {
    // The JSON library's byte count is 1-based and refers to the last byte read.
    const std::size_t byte = error.byte > 0 ? error.byte - 1 : 0;
    const bool at_end = byte >= text.size();
    std::string what = error.what();
    const std::size_t detail = what.rfind("; ");
    what = detail == what.npos ? "" : " (" + what.substr(detail + 2) + ")";
    return refused(path + ":" + position(text, byte) +
                   (at_end ? ": the JSON text ends too early; the file may be truncated"
                           : ": not valid JSON here") +
                   what);
  } catch (const Json::exception& error) {
    return refused(path + ": not usable as JSON: " + error.what());
  }
}

ManifestResult read_manifest(const std::string& path) {
  // Checks the file before opening it: once no other user can replace it, the file opened is the
  // file checked.
  if (std::string problem = file_trust_problem(path); !problem.empty()) {
    return refused(path + ": refused: " + problem);
  }
  const ByteSource file(path);
  if (file.state() != FileState::kRegular) return refused(path + ": " + file.error());
  if (file.size() > kMaxManifestBytes) return refused(too_large(path, file.size()));
  std::vector<std::uint8_t> raw;
  if (!file.read(0, file.size(), raw)) return refused(path + ": it cannot be read to its end");
  return parse_manifest({reinterpret_cast<const char*>(raw.data()), raw.size()}, path);
}

}  // namespace te_fl::plugins
