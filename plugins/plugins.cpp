// The public functions of te_fl/plugins.hpp.
#include "te_fl/plugins.hpp"

#include <algorithm>
#include <filesystem>

#include "core/base/answer.hpp"
#include "core/base/plugin_settings.hpp"
#include "core/base/text.hpp"
#include "plugins/discovery.hpp"
#include "plugins/file_trust.hpp"
#include "plugins/load_turn.hpp"
#include "plugins/loader.hpp"
#include "plugins/manifest.hpp"
#include "plugins/modules.hpp"
#include "plugins/on_demand.hpp"
#include "plugins/records.hpp"
#include "plugins/start.hpp"
#include "te_fl/op_registry.hpp"

namespace te_fl::plugins {
namespace {

// Returns the process's registry after discovery. If a plugin calls this while it is being loaded,
// the call returns without waiting for discovery.
OpRegistry& filled_registry() {
  if (!LoadTurn::mine()) start();
  return OpRegistry::instance();
}

Result<PluginInfo> load_by_name(const std::string& name, OpRegistry& registry) {
  const SearchPath path = manifest_folders();
  const ManifestScan scan = discover_manifests(path.folders);
  std::vector<std::string> names;
  for (const Manifest& manifest : scan.manifests) {
    if (manifest.name == name) {
      on_demand::forget(name);
      return load_library({manifest.library_path, "load()", &manifest, ""}, registry);
    }
    names.push_back(manifest.name);
  }
  std::string no_module;
  if (modules::any()) {
    Result<PluginInfo> module = modules::load(name);
    if (module.ok() || module.status().code() != StatusCode::kNotFound) return module;
    no_module = module.status().message() + "; ";
  }
  std::string text = no_module + "no manifest has the name '" + name + "'" +
                     core::did_you_mean(name, names) +
                     " (known: " + (names.empty() ? "none" : core::join(names)) + "; looked in " +
                     (path.folders.empty() ? "no folder, since TE_FL_PLUGIN_PATH is set and empty"
                                           : core::join(path.folders)) +
                     ")";
  if (name.ends_with(".so")) text += "; a file needs a '/' in its name: ./" + name;
  for (const std::string& error : scan.errors) text += "; refused: " + error;
  return not_found(text);
}

std::string describe_count(const ManifestScan& scan) {
  if (!scan.absent.empty()) return "absent";
  const size_t good = scan.manifests.size();
  std::string text = std::to_string(good) + (good == 1 ? " manifest" : " manifests");
  for (const std::string& error : scan.errors) text += "; refused: " + error;
  return text;
}

}  // namespace

std::string_view to_string(State state) {
  switch (state) {
    case State::kActive:
      return "active";
    case State::kFailed:
      return "failed";
    case State::kSkipped:
      return "skipped";
    case State::kAbandoned:
      return "abandoned";
    case State::kRetired:
      return "retired";
    case State::kDeactivated:
      return "deactivated";
  }
  return "unknown";
}

std::vector<PluginInfo> list() {
  on_demand::load(nullptr, filled_registry());
  return records::list();
}

Result<PluginInfo> load(const std::string& path_or_name) {
  OpRegistry& registry = filled_registry();
  if (path_or_name.find('/') == path_or_name.npos) return load_by_name(path_or_name, registry);
  namespace fs = std::filesystem;
  std::error_code error;
  const fs::path path = fs::absolute(path_or_name, error);
  std::string normal = error ? path_or_name : path.lexically_normal().string();
  // A ".." after a symbolic link refers to the parent of the link's target, so it cannot be removed
  // textually.
  if (std::find(path.begin(), path.end(), "..") != path.end()) {
    const fs::path folder = fs::canonical(path.parent_path(), error);
    if (!error) normal = (folder / path.filename()).string();
  }
  return load_library({normal, "load()", nullptr, ""}, registry);
}

Status deactivate(const std::string& name, bool unmap) {
  return deactivate_plugin(name, unmap, filled_registry());
}

std::string take_status_misuse() {
  const te_fl_status odd = core::g_odd_status.exchange(TE_FL_OK);
  return odd == TE_FL_OK ? std::string() : core::odd_status_text(odd);
}

std::string take_undeclared_setting() { return core::take_undeclared_setting(); }

Result<std::vector<Finding>> diagnose(const std::string& name) {
  filled_registry();
  const Record record = records::active(name);
  if (record.instance == nullptr) return not_found("no active plugin has the name '" + name + "'");
  return record.instance->diagnose();
}

std::vector<std::string> search_path() {
  const SearchPath path = manifest_folders();
  std::vector<std::string> out;
  for (const std::string& folder : path.folders) {
    out.push_back(folder + ": " + describe_count(discover_manifests({folder})));
  }
  out.insert(out.end(), path.problems.begin(), path.problems.end());
  return out;
}

std::string trust_problem(const std::string& path) { return file_trust_problem(path); }

}  // namespace te_fl::plugins
