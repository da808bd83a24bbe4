// Plugin manifests: small JSON files with a plugin's location and the conditions for loading it.
//
//   {
//     "file_format_version": "1.0",
//     "name": "acme",                        a-z, 0-9, '.', '_', '-'; at most 64 letters
//     "vendor": "acme",                      the same
//     "library_path": "../libte_fl_acme.so", absolute, or relative to the manifest's folder
//     "arch": "x86_64",                      as `uname -m` prints it
//     "abi": "0.1",                          ABI of plugin.h that it was built against
//     "probe": {"pci_vendor": "0x1234"},     optional; the plugin is left out when nothing matches
//     "load_for": ["ext:acme"],              optional; types of devices: the plugin is loaded when
//                                            one of them is asked for, not when the process starts
//                                            ("communicators": when one is made for host memory)
//     "settings": [{                         optional; as the plugin itself declares them (R21), so
//       "name": "TE_FL_ACME_DEBUG",          that they are known while it is not loaded
//       "type": "bool",                      string, bool, int, enum, list or file
//       "default": "0",                      optional
//       "choices": "",                       enum: words; int: "MIN MAX"; optional otherwise
//       "doc": "1: says what it does."
//     }],
//     "vendor_aliases": ["acme-inc"],        optional; the vendor's other names in policies
//     "packages": [{                         optional; packages that provide needed libraries
//       "soname": "libacmert.so.2",          or "libacmert.so", for every version
//       "apt": "acme-runtime",               at least one of apt, note and pypi
//       "note": "Acme's repository",
//       "pypi": "acme-runtime"
//     }]
//   }
//
// Parsing is strict: an unknown or repeated key is an error that suggests the closest valid key.
// The functions here throw nothing but std::bad_alloc. All are thread-safe, except that setenv must
// not run beside those that read environment variables.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/plugin_settings.hpp"
#include "plugins/soname_hints.hpp"
#include "te_fl/device.hpp"

namespace te_fl::plugins {

// A declarative test for hardware. It matches if any condition holds, or if there are no
// conditions.
struct Probe {
  std::optional<std::uint16_t> pci_vendor;  // vendor id of some PCI device
  std::string device_node;                  // absolute path below /dev that exists
  bool always = false;

  bool empty() const { return !pci_vendor && device_node.empty() && !always; }
};

struct Manifest {
  std::string path;  // path of the manifest itself
  std::string name;
  std::string vendor;
  std::string library_path;  // resolved against the manifest's folder; an absolute path as written
  std::string arch;
  int abi_major = 0;
  int abi_minor = 0;
  Probe probe;
  // The device types and providers on whose first use the plugin is loaded, with index 0; the host
  // device means communicators for host memory. Empty: the plugin is loaded at start.
  std::vector<Device> load_for;
  std::vector<core::PluginSetting> settings;
  std::vector<std::string> vendor_aliases;
  std::vector<LibraryPackage> packages;
};

struct ManifestResult {
  Manifest manifest;  // meaningful only when ok()
  std::string error;  // begins with the path, and the line and column where that makes sense
  bool ok() const { return error.empty(); }
};

constexpr std::size_t kMaxManifestBytes = 64 << 10;
constexpr int kMaxManifestDepth = 8;

// Parses a manifest's text. `path` is the file it came from: messages contain it, and library_path
// is relative to its folder.
ManifestResult parse_manifest(std::string_view text, const std::string& path);
// Reads and parses a file after checking which users can write it (see file_trust.hpp).
ManifestResult read_manifest(const std::string& path);

// True if matching hardware is present. `sysroot` is a prefix for /sys and /dev, for tests and
// containers.
bool probe_matches(const Probe& probe, const std::string& sysroot = "");
// Describes the conditions: "PCI vendor 0x10de", "device node /dev/nvidia0", "PCI vendor 0x10de or
// ...", "always".
std::string describe(const Probe& probe);

struct ShadowedManifest {
  std::string path;
  std::string name;
  std::string winner;  // path of the earlier manifest with that name
};

struct ManifestScan {
  std::vector<Manifest> manifests;         // in the order of loading
  std::vector<std::string> errors;         // rejected manifests and folders, with reasons
  std::vector<ShadowedManifest> shadowed;  // later manifests with a name already used
  std::vector<std::string> absent;         // folders that do not exist
};

// Reads every *.json file of the folders: folders in the given order, files sorted by the bytes of
// their names, independent of the locale. The first manifest of a name wins; a rejected one does
// not reserve its name. A relative folder is rejected. Does not evaluate the probes.
ManifestScan discover_manifests(const std::vector<std::string>& folders);

struct SearchPath {
  std::vector<std::string> folders;
  std::vector<std::string> problems;  // rejected entries, each with a remedy
};

// Splits a colon-separated list of folders; `origin` names the list in messages
// ("TE_FL_PLUGIN_PATH"). Rejects empty and relative entries, so that the working directory is never
// searched. With elevated privileges the whole value is ignored, which is reported as a problem.
SearchPath split_plugin_path(std::string_view value, const std::string& origin);

// The folders searched after TE_FL_PLUGIN_PATH: $XDG_DATA_HOME/te_fl/plugins.d (or
// ~/.local/share/te_fl/plugins.d; neither with elevated privileges), /etc/te_fl/plugins.d and
// <prefix>/lib/te_fl/plugins.d. The last is omitted for an empty prefix.
std::vector<std::string> default_manifest_folders(const std::string& prefix);
// Like default_manifest_folders(), with the messages about rejected values.
SearchPath default_search_path(const std::string& prefix);

}  // namespace te_fl::plugins
