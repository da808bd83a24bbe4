#include "plugins/discovery.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <exception>
#include <filesystem>
#include <iterator>
#include <set>

#include "core/base/plugin_settings.hpp"
#include "core/base/text.hpp"
#include "plugins/file_trust.hpp"
#include "plugins/loader.hpp"
#include "plugins/modules.hpp"
#include "plugins/nearest.hpp"
#include "plugins/on_demand.hpp"
#include "plugins/records.hpp"
#include "plugins/split_list.hpp"
#include "policy/vendors.hpp"
#include "registry/registry_impl.hpp"
#include "te_fl/environment.hpp"
#include "te_fl/log.hpp"

namespace te_fl::plugins {
namespace {

namespace fs = std::filesystem;

constexpr const char* kModules = "TE_FL_PLUGIN_MODULES";
constexpr const char* kPluginPath = "TE_FL_PLUGIN_PATH";
constexpr const char* kCudaPlugin = "cuda";  // the plugin that TE_FL_SKIP_CUDA excludes

void leave_out(PluginInfo info, State state, std::string reason) {
  info.state = state;
  info.reason = std::move(reason);
  log::debug("plugin " + info.name + " (" + info.origin + ") left out: " + info.reason);
  records::put({std::move(info), nullptr, {}, {}, {}});
}

// Accepts a dotted Python module name such as "package.module": letters, digits, '_' and dots.
bool is_dotted_name(std::string_view word) {
  bool dotted = false, start = true;
  for (const char c : word) {
    if (c == '.') {
      if (start) return false;
      dotted = start = true;
      continue;
    }
    const bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
    if (!letter && (start || c < '0' || c > '9')) return false;
    start = false;
  }
  return dotted && !start;
}

class Discovery {
 public:
  explicit Discovery(OpRegistry& registry)
      : registry_(registry),
        skip_cuda_(environment::get("TE_FL_SKIP_CUDA").ok() &&
                   *environment::get("TE_FL_SKIP_CUDA") == "1") {}

  void run() {
    scan();
    const std::optional<std::string> modules = environment::get_if_set(kModules);
    std::set<std::string> named;
    for (const std::string& entry : split_list(modules.value_or(""))) {
      if (named.insert(entry).second) load_module(entry);  // repeated names are loaded once
    }
    for (const Manifest& manifest : scan_.manifests) {
      if (!done_.count(manifest.name)) load_manifest(manifest, manifest.path, false);
    }
    for (const ShadowedManifest& shadowed : scan_.shadowed) {
      PluginInfo info;
      info.name = shadowed.name;
      info.origin = shadowed.path;
      leave_out(info, State::kSkipped, shadowed.winner + " has the name and is found first");
    }
    if (modules::any()) {
      std::vector<std::string> manifests;
      for (const Manifest& manifest : scan_.manifests) manifests.push_back(manifest.name);
      modules::start(modules_, manifests);
    }
  }

 private:
  void scan() {
    const SearchPath path = manifest_folders();
    for (const std::string& problem : path.problems) log::warning(problem);
    scan_ = discover_manifests(path.folders);
    const std::vector<std::string> asked =
        split_plugin_path(environment::get_if_set(kPluginPath).value_or(""), kPluginPath).folders;
    for (const std::string& folder : scan_.absent) {
      if (std::find(asked.begin(), asked.end(), folder) == asked.end()) continue;
      PluginInfo info;
      info.name = folder;
      info.origin = kPluginPath;
      log::warning(std::string(kPluginPath) + ": the folder " + folder + " does not exist");
      leave_out(info, State::kFailed, "the folder does not exist");
    }
    for (const std::string& error : scan_.errors) {
      // Each error text begins with the path of the file or folder.
      const std::string file = error.substr(0, error.find(": "));
      PluginInfo info;
      info.name = fs::path(file).stem().string();
      info.origin = file;
      info.state = State::kFailed;
      info.reason = error;
      log::warning("plugin manifest refused: " + error);
      records::put({std::move(info), nullptr, {}, {}, {}});
    }
    // Declares the settings before any plugin is loaded, so that those of skipped plugins are known
    // too.
    for (const Manifest& manifest : scan_.manifests) {
      const Status declared = core::declare_settings(manifest.name, manifest.settings, false);
      if (!declared.ok()) log::warning(manifest.path + ": " + declared.message());
    }
    learn_aliases();
  }

  // Adds the vendor aliases of all manifests, skipped plugins included, since another plugin of the
  // vendor may be loaded by its path.
  void learn_aliases() {
    bool learnt = false;
    for (const Manifest& manifest : scan_.manifests) {
      for (const std::string& alias : manifest.vendor_aliases) {
        learnt = policy::add_vendor_alias(alias, manifest.vendor) || learnt;
      }
    }
    if (learnt) registry::choose_again();
  }

  void load_module(const std::string& entry) {
    const bool like_file = entry.find('/') != entry.npos || entry.ends_with(".so");
    if (!like_file) return load_name(entry);
    if (entry.front() == '/') {
      LoadRequest request{entry, kModules, nullptr, skip_cuda_ ? kCudaPlugin : ""};
      static_cast<void>(load_library(request, registry_));  // it records and logs the result
      return;
    }
    unresolved(entry, State::kFailed,
               "is a relative path, and plugins are never looked for relative to the working "
               "directory; write the absolute path");
  }

  void load_name(const std::string& name) {
    std::vector<std::string> names;
    for (const Manifest& manifest : scan_.manifests) {
      if (manifest.name == name) return load_manifest(manifest, kModules, true);
      names.push_back(manifest.name);
    }
    if (modules::any()) return modules_.push_back(name);
    const std::string near = nearest_name(name, names);
    if (!near.empty()) {
      unresolved(name, State::kFailed, "is the name of no manifest; did you mean " + near + "?");
    } else if (is_dotted_name(name)) {
      unresolved(name, State::kSkipped,
                 "looks like a Python module, and this process loads only te-fl plugins: name a "
                 "library by its absolute path, or a manifest");
    } else {
      // The name may be a module that a Python program imports later, so this is never an error.
      unresolved(
          name, State::kSkipped,
          "is the name of no manifest (known: " + (names.empty() ? "none" : core::join(names)) +
              "); the manifests' folders are TE_FL_PLUGIN_PATH and those that `te-fl "
              "doctor` lists");
    }
  }

  void unresolved(const std::string& entry, State state, const std::string& why) {
    PluginInfo info;
    info.name = entry;
    info.origin = kModules;
    log::warning(std::string(kModules) + ": \"" + entry + "\" " + why);
    leave_out(info, state, why);
  }

  void load_manifest(const Manifest& manifest, const std::string& origin, bool is_requested) {
    done_.insert(manifest.name);
    PluginInfo info;
    info.name = manifest.name;
    info.vendor = manifest.vendor;
    info.path = manifest.library_path;
    info.origin = origin;
    if (skip_cuda_ && manifest.name == kCudaPlugin) {
      return leave_out(info, State::kSkipped, "TE_FL_SKIP_CUDA is 1");
    }
    if (!is_requested && !probe_matches(manifest.probe)) {
      return leave_out(info, State::kSkipped,
                       "its hardware is not here: " + describe(manifest.probe));
    }
    if (!is_requested && !manifest.load_for.empty()) return on_demand::wait(manifest);
    const LoadRequest request{manifest.library_path, origin, &manifest, ""};
    static_cast<void>(load_library(request, registry_));  // it records and logs the result
  }

  OpRegistry& registry_;
  bool skip_cuda_;
  ManifestScan scan_;
  std::vector<std::string> modules_;  // names for the ModuleLoader
  std::set<std::string> done_;        // names of manifests already processed
};

}  // namespace

std::string find_prefix(const std::string& path) {
  std::error_code error;
  const fs::path real = fs::canonical(path, error);
  if (error) return {};
  fs::path folder = real.parent_path();
  // The library is in <prefix>/lib or in <prefix>/lib/x86_64-linux-gnu.
  for (int depth = 0; depth < 2; ++depth, folder = folder.parent_path()) {
    const fs::path name = folder.filename();
    if (name == "lib" || name == "lib64" || name == "bin") return folder.parent_path().string();
  }
  return {};
}

std::string installation_prefix() {
  Dl_info where{};
  if (dladdr(reinterpret_cast<void*>(&discover), &where) != 0 && where.dli_fname != nullptr) {
    if (std::string prefix = find_prefix(where.dli_fname); !prefix.empty()) return prefix;
  }
  return TE_FL_INSTALL_PREFIX;
}

SearchPath manifest_folders() {
  const std::optional<std::string> value = environment::get_if_set("TE_FL_PLUGIN_PATH");
  if (value == "" && !privileges_elevated()) return {};  // set but empty: no folders
  SearchPath path = split_plugin_path(value.value_or(""), "TE_FL_PLUGIN_PATH");
  SearchPath rest = default_search_path(installation_prefix());
  std::move(rest.folders.begin(), rest.folders.end(), std::back_inserter(path.folders));
  std::move(rest.problems.begin(), rest.problems.end(), std::back_inserter(path.problems));
  return path;
}

Status named_plugins_status() {
  std::vector<std::string> failures = records::failures_from(kModules);
  const char* where = kModules;
  if (failures.empty()) failures = records::failures_from(where = kPluginPath);
  if (failures.empty()) return {};
  return failed_precondition(core::join(failures, "; ") + " (named in " + where +
                             ", and TE_FL_STRICT is set: correct the name or the plugin, leave it "
                             "out, or unset TE_FL_STRICT)");
}

void discover(OpRegistry& registry) {
  try {
    Discovery(registry).run();
  } catch (const std::exception& e) {  // out of memory: the host continues without the rest
    log::error(std::string("looking for plugins was cut short: ") + e.what());
  }
}

}  // namespace te_fl::plugins
