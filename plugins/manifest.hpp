// Plugin manifests: small JSON files that tell where a plugin is and when it applies.
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
//     "settings": [{                         optional; what its header declares too (rule R21), so
//       "name": "TE_FL_ACME_DEBUG",          that they are known while the plugin is left out
//       "type": "bool",                      string, bool, int, enum, list or file
//       "default": "0",                      optional
//       "choices": "",                       enum: words; int: "MIN MAX"; optional otherwise
//       "doc": "1: says what it does."
//     }],
//     "vendor_aliases": ["acme-inc"],        optional; the vendor's other names in policies
//     "packages": [{                         optional; what installs a library that it needs
//       "soname": "libacmert.so.2",          or "libacmert.so", for every version
//       "apt": "acme-runtime",               at least one of apt, note and pypi
//       "note": "Acme's repository",
//       "pypi": "acme-runtime"
//     }]
//   }
//
// Parsing is strict: an unknown or repeated key is an error that names the nearest right one. No
// function here throws, apart from std::bad_alloc. All are thread-safe; those that read environment
// variables must not run beside setenv.
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

// A declarative test for hardware. Any condition that holds is enough; without conditions the probe
// always matches.
struct Probe {
  std::optional<std::uint16_t> pci_vendor;  // vendor id of some PCI device
  std::string device_node;                  // absolute path below /dev that exists
  bool always = false;

  bool empty() const { return !pci_vendor && device_node.empty() && !always; }
};

struct Manifest {
  std::string path;  // of the manifest itself
  std::string name;
  std::string vendor;
  std::string library_path;  // resolved against the manifest's folder, as written otherwise
  std::string arch;
  int abi_major = 0;
  int abi_minor = 0;
  Probe probe;
  // Types and providers, index 0; the host stands for communicators. Empty: loaded at once.
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

// Parses a manifest's text. `path` is where it was read; it appears in messages and its folder
// resolves library_path.
ManifestResult parse_manifest(std::string_view text, const std::string& path);
// Reads and parses a file after checking who can write it (see file_trust.hpp).
ManifestResult read_manifest(const std::string& path);

// True if the hardware is here. `sysroot` is put before /sys and /dev, for tests and containers.
bool probe_matches(const Probe& probe, const std::string& sysroot = "");
// "PCI vendor 0x10de", "device node /dev/nvidia0", "PCI vendor 0x10de or ...", "always".
std::string describe(const Probe& probe);

struct ShadowedManifest {
  std::string path;
  std::string name;
  std::string winner;  // path of the manifest that has the name
};

struct ManifestScan {
  std::vector<Manifest> manifests;         // in the order in which plugins are considered
  std::vector<std::string> errors;         // manifests and folders that were refused, and why
  std::vector<ShadowedManifest> shadowed;  // later manifests whose name was taken
  std::vector<std::string> absent;         // folders that do not exist
};

// Reads every *.json of the folders: folders in the order given, files sorted by name (by bytes,
// whatever the locale). The first manifest of a name wins; a refused one does not take its name.
// A relative folder is refused. The probes are not evaluated.
ManifestScan discover_manifests(const std::vector<std::string>& folders);

struct SearchPath {
  std::vector<std::string> folders;
  std::vector<std::string> problems;  // entries that were refused, each with the way out
};

// Splits a colon-separated list of folders; `origin` names it in messages ("TE_FL_PLUGIN_PATH").
// Empty and relative entries are refused, since the working directory never counts. With elevated
// privileges the whole value is ignored, and a problem says so.
SearchPath split_plugin_path(std::string_view value, const std::string& origin);

// The folders searched after TE_FL_PLUGIN_PATH: $XDG_DATA_HOME/te_fl/plugins.d (else
// ~/.local/share/te_fl/plugins.d; neither with elevated privileges), /etc/te_fl/plugins.d and
// <prefix>/lib/te_fl/plugins.d. An empty prefix leaves the last out.
std::vector<std::string> default_manifest_folders(const std::string& prefix);
// Same, with the messages about values that were refused.
SearchPath default_search_path(const std::string& prefix);

}  // namespace te_fl::plugins
