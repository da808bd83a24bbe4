#pragma once

#include <string>
#include <vector>

#include "te_fl/export.hpp"
#include "te_fl/status.hpp"

// Loading and deactivating plugins. All functions are thread-safe; they act on
// OpManager::instance().
namespace te_fl::plugins {

enum class State { kActive, kFailed, kSkipped, kAbandoned, kRetired, kDeactivated };
TE_FL_API std::string_view to_string(State state);

struct PluginInfo {
  std::string name;
  std::string vendor;
  std::string version;
  std::string build_id;
  std::string path;    // of the library; empty for built-ins
  std::string origin;  // "built-in", "TE_FL_PLUGIN_MODULES", the manifest's path, "load()"
  std::string abi;     // "0.1"
  State state = State::kFailed;
  std::string reason;  // why it failed, was skipped, is still referenced
  double load_ms = 0;
  std::vector<std::string> devices;
  std::vector<std::string> ops;  // "op: impl_id"
};

// Every plugin met so far, built-ins first.
TE_FL_API std::vector<PluginInfo> list();
// Loads a library (path, or a name looked up in the manifests) and activates it. After an error
// nothing of the plugin remains loaded.
TE_FL_API Result<PluginInfo> load(const std::string& path_or_name);
// Deactivates: no new call enters it, running calls end, then it is quiesced and destroyed; if
// tensors, streams or plans still refer to it, it becomes kRetired and is destroyed when the last
// goes. BUSY from inside an op.
TE_FL_API Status deactivate(const std::string& name);
// Where manifests are looked for, in order, with what was found.
TE_FL_API std::vector<std::string> search_path();

}  // namespace te_fl::plugins
