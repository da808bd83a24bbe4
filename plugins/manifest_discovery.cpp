#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>

#include "plugins/file_trust.hpp"
#include "plugins/manifest.hpp"

namespace te_fl::plugins {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kMaxManifestsPerFolder = 1024;

std::string hex_id(std::uint16_t id) {
  char text[8];
  std::snprintf(text, sizeof(text), "0x%04x", id);
  return text;
}

bool has_pci_vendor(std::uint16_t id, const std::string& sysroot) {
  std::error_code error;
  fs::directory_iterator it(sysroot + "/sys/bus/pci/devices", error);
  for (; !error && it != fs::directory_iterator(); it.increment(error)) {
    std::ifstream file(it->path() / "vendor");
    std::string text;
    // The kernel writes the id as "0x10de".
    if (file >> text && text.size() <= 10 && std::strtoul(text.c_str(), nullptr, 16) == id) {
      return true;
    }
  }
  return false;
}

// Lists the folder's *.json files, sorted by name. Returns an error text.
std::string list_folder(const std::string& folder, std::vector<std::string>& files) {
  std::error_code error;
  fs::directory_iterator it(folder, error);
  for (; !error && it != fs::directory_iterator(); it.increment(error)) {
    const std::string name = it->path().filename().string();
    // Skips names that begin with a dot, such as editors' backup and lock files.
    if (name.ends_with(".json") && !name.starts_with('.')) files.push_back(it->path().string());
    if (files.size() > kMaxManifestsPerFolder) {
      files.clear();
      return "it holds more than " + std::to_string(kMaxManifestsPerFolder) + " manifests";
    }
  }
  std::sort(files.begin(), files.end());
  return error ? "it cannot be listed: " + error.message() : std::string();
}

}  // namespace

bool probe_matches(const Probe& probe, const std::string& sysroot) {
  if (probe.empty() || probe.always) return true;
  if (probe.pci_vendor && has_pci_vendor(*probe.pci_vendor, sysroot)) return true;
  std::error_code error;
  return !probe.device_node.empty() && fs::exists(sysroot + probe.device_node, error);
}

std::string describe(const Probe& probe) {
  if (probe.empty() || probe.always) return "always";
  std::string out;
  if (probe.pci_vendor) out = "PCI vendor " + hex_id(*probe.pci_vendor);
  if (!probe.device_node.empty()) {
    out += (out.empty() ? "" : " or ") + ("device node " + probe.device_node);
  }
  return out;
}

ManifestScan discover_manifests(const std::vector<std::string>& folders) {
  ManifestScan out;
  std::map<std::string, std::string> owner_of_name;
  for (const std::string& folder : folders) {
    if (!folder.starts_with('/')) {
      out.errors.push_back(folder + ": a plugin folder must be an absolute path");
      continue;
    }
    std::error_code error;
    if (!fs::exists(folder, error)) {
      out.absent.push_back(folder);
      continue;
    }
    if (!fs::is_directory(folder, error)) {
      out.errors.push_back(folder + ": not a folder; name the folder that holds the manifests");
      continue;
    }
    std::vector<std::string> files;
    if (std::string problem = list_folder(folder, files); !problem.empty()) {
      out.errors.push_back(folder + ": " + problem);
    }
    for (const std::string& file : files) {
      ManifestResult result = read_manifest(file);
      if (!result.ok()) {
        out.errors.push_back(std::move(result.error));
        continue;
      }
      const std::string name = result.manifest.name;
      const auto [it, is_new] = owner_of_name.emplace(name, file);
      if (is_new) {
        out.manifests.push_back(std::move(result.manifest));
      } else if (it->second != file) {  // a folder that is listed twice does not shadow itself
        out.shadowed.push_back({file, name, it->second});
      }
    }
  }
  return out;
}

SearchPath split_plugin_path(std::string_view value, const std::string& origin) {
  SearchPath out;
  if (value.empty()) return out;
  if (privileges_elevated()) {
    out.problems.push_back(origin +
                           " is ignored, since this process runs with elevated privileges");
    return out;
  }
  for (std::size_t begin = 0; begin <= value.size();) {
    const std::size_t end = std::min(value.find(':', begin), value.size());
    const std::string entry(value.substr(begin, end - begin));
    begin = end + 1;
    if (entry.starts_with('/')) {
      out.folders.push_back(entry);
    } else {
      out.problems.push_back(
          origin + ": entry \"" + entry + "\" is " + (entry.empty() ? "empty" : "relative") +
          " and is left out: plugins are never looked for relative to the working directory; " +
          (entry.empty() ? "remove the stray ':'" : "write the absolute path"));
    }
  }
  return out;
}

SearchPath default_search_path(const std::string& prefix) {
  constexpr const char* kFolder = "/te_fl/plugins.d";
  SearchPath out;
  if (!privileges_elevated()) {
    const char* data = std::getenv("XDG_DATA_HOME");
    const char* home = std::getenv("HOME");
    if (data != nullptr && data[0] != '\0' && data[0] != '/') {
      out.problems.push_back("XDG_DATA_HOME is \"" + std::string(data) +
                             "\", a relative path, and is left out; set an absolute path");
    }
    if (data != nullptr && data[0] == '/') {
      out.folders.push_back(std::string(data) + kFolder);
    } else if (home != nullptr && home[0] == '/') {
      out.folders.push_back(std::string(home) + "/.local/share" + kFolder);
    }
  }
  out.folders.push_back(std::string("/etc") + kFolder);
  if (prefix.starts_with('/')) {
    out.folders.push_back(prefix + "/lib" + kFolder);
  } else if (!prefix.empty()) {
    out.problems.push_back("installation prefix \"" + prefix + "\" is not an absolute path");
  }
  return out;
}

std::vector<std::string> default_manifest_folders(const std::string& prefix) {
  return default_search_path(prefix).folders;
}

}  // namespace te_fl::plugins
