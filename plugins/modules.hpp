// Plugins written as modules of an interpreted language (ModuleLoader).
#pragma once

#include <string>
#include <vector>

#include "te_fl/plugins.hpp"

namespace te_fl::plugins::modules {

// True if a ModuleLoader is set.
bool any() noexcept;
// Loads the modules that TE_FL_PLUGIN_MODULES names, and those of installed packages unless
// TE_FL_SKIP_MODULES excludes them. Records and reports each. `manifests`: the names of manifests,
// for suggestions.
void start(const std::vector<std::string>& named, const std::vector<std::string>& manifests);
// Loads one module and records it. NOT_FOUND: there is no such module; ALREADY_EXISTS: it is
// active; UNSUPPORTED: the module declined to run on this system; INCOMPATIBLE: loading it failed.
Result<PluginInfo> load(const std::string& name);

}  // namespace te_fl::plugins::modules
