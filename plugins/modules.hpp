// Plugins that are modules of an interpreted language (ModuleLoader).
#pragma once

#include <string>
#include <vector>

#include "te_fl/plugins.hpp"

namespace te_fl::plugins::modules {

// True if a loader is set.
bool any() noexcept;
// At start: the modules that TE_FL_PLUGIN_MODULES names, and those of installed packages unless
// TE_FL_SKIP_MODULES says otherwise. Records and reports each. `manifests`: their names, one of
// which may have been meant.
void start(const std::vector<std::string>& named, const std::vector<std::string>& manifests);
// Loads one and records it. NOT_FOUND: there is no such module; ALREADY_EXISTS: it is active;
// UNSUPPORTED: it does not want to serve here; INCOMPATIBLE: it failed.
Result<PluginInfo> load(const std::string& name);

}  // namespace te_fl::plugins::modules
