// Lists the plugins that are loaded on first use, and the folders in which manifests are looked
// for.
#pragma once

#include <string>
#include <vector>

#include "plugins/manifest.hpp"
#include "te_fl/op_registry.hpp"

namespace te_fl::plugins {

// Loads what TE_FL_PLUGIN_MODULES names, then what the manifests offer. Called once, by the first
// use of OpManager::instance(), after the built-in backends are registered. Whatever fails is
// recorded and logged; nothing here makes the host fail.
void discover(OpRegistry& registry);

// FAILED_PRECONDITION, with the reason, if a plugin that TE_FL_PLUGIN_MODULES names was not loaded.
// Under TE_FL_STRICT no op runs then: what the user asked for is not there.
Status named_plugins_status();

// The installation prefix that holds libte_fl (or the program that it is linked into), from where
// it was loaded; TE_FL_INSTALL_PREFIX when it does not lie in a lib or bin folder.
std::string installation_prefix();
// The prefix of a library or program at `path`, empty when its folder is not a lib or bin folder.
std::string prefix_of(const std::string& path);

// Folders of TE_FL_PLUGIN_PATH, then the default ones; none if the variable is set and empty.
SearchPath manifest_folders();

}  // namespace te_fl::plugins
