// Loads a plugin from a file, and deactivates plugins.
#pragma once

#include <functional>
#include <string>

#include "plugins/manifest.hpp"
#include "te_fl/op_registry.hpp"
#include "te_fl/plugins.hpp"

namespace te_fl::plugins {

struct LoadRequest {
  std::string path;                    // path of the library, absolute
  std::string origin;                  // becomes PluginInfo::origin
  const Manifest* manifest = nullptr;  // checked against the library; may be null
  std::string leave_out;               // a plugin with this name is skipped, not loaded
  // Called after the lock for loads was acquired (LoadTurn). If it returns false, nothing is loaded
  // or recorded.
  std::function<bool()> still_wanted = nullptr;
};

// Loads a plugin. Steps: file trust check, manifest check, dlopen, query, settings, create,
// devices, ops. All steps succeed or none has an effect. Adds a record and a log line in every
// case. Waits for other loads (LoadTurn).
Result<PluginInfo> load_library(const LoadRequest& request, OpRegistry& registry);

// Activates a backend that is part of libte_fl and records it. Logs a failure.
void load_builtin(const char* name, te_fl_plugin_query_fn query, OpRegistry& registry);

// Implements plugins::deactivate.
Status deactivate_plugin(const std::string& name, bool unmap, OpRegistry& registry);

}  // namespace te_fl::plugins
