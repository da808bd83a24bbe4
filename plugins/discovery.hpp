// Finds and loads the plugins at the first use of te-fl, and lists the folders of manifests.
#pragma once

#include <string>
#include <vector>

#include "plugins/manifest.hpp"
#include "te_fl/op_registry.hpp"

namespace te_fl::plugins {

// Loads the plugins named in TE_FL_PLUGIN_MODULES, then those of the manifests. Called once, by the
// first use of OpManager::instance(), after the built-in backends are registered. Records and logs
// failures; the host never fails because of one.
void discover(OpRegistry& registry);

// FAILED_PRECONDITION with the reason if a plugin named in TE_FL_PLUGIN_MODULES was not loaded.
// Under TE_FL_STRICT no op runs in that case.
Status named_plugins_status();

// The installation prefix, derived from the path of libte_fl (or of the program that contains it).
// TE_FL_INSTALL_PREFIX if that path is not in a lib or bin folder.
std::string installation_prefix();
// The prefix of a library or program at `path`; empty if its folder is not a lib or bin folder.
std::string find_prefix(const std::string& path);

// The folders of TE_FL_PLUGIN_PATH, then the default ones. None if the variable is set and empty.
SearchPath manifest_folders();

}  // namespace te_fl::plugins
