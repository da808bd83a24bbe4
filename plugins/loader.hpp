// From a file to an active plugin, and back.
#pragma once

#include <functional>
#include <string>

#include "plugins/manifest.hpp"
#include "te_fl/op_registry.hpp"
#include "te_fl/plugins.hpp"

namespace te_fl::plugins {

struct LoadRequest {
  std::string path;                    // of the library, absolute
  std::string origin;                  // PluginInfo::origin
  const Manifest* manifest = nullptr;  // its promises are checked; may be null
  std::string leave_out;               // a plugin of this name is skipped, not loaded
  // Asked when the turn to load has come: if it says no, nothing is done and nothing recorded.
  std::function<bool()> still_wanted = nullptr;
};

// Trust, manifest, dlopen, query, settings, create, devices, ops: all of it, or nothing remains.
// Leaves a record and a log line in every case. Waits for its turn.
Result<PluginInfo> load_library(const LoadRequest& request, OpRegistry& registry);

// Activates a backend that is part of libte_fl, and records it. A failure is logged.
void load_builtin(const char* name, te_fl_plugin_query_fn query, OpRegistry& registry);

// See plugins::deactivate.
Status deactivate_plugin(const std::string& name, bool unmap, OpRegistry& registry);

}  // namespace te_fl::plugins
