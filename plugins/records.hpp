// The records of all plugins that this process has loaded, tried to load or skipped.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "plugins/activate.hpp"
#include "plugins/library.hpp"
#include "te_fl/plugins.hpp"

namespace te_fl::plugins {

struct Record {
  PluginInfo info;
  std::shared_ptr<Instance> instance;  // while active; permanent if quiesce() failed
  std::weak_ptr<Instance> retired;     // from deactivation to destruction
  std::weak_ptr<Library> library;      // of an active plugin
  std::shared_ptr<Library> kept;       // keeps a deactivated plugin mapped
  bool is_module = false;              // from a ModuleLoader: no instance and no library
};

// The list of records. Thread-safe; all functions return copies.
namespace records {

// Adds a record. Replaces an older record of the same plugin, unless that is active, retired or
// abandoned.
void put(Record record);
// All records with their current state, built-in backends first.
std::vector<PluginInfo> list();
// True if there is a record of the built-in backend with this name, in any state.
bool has_builtin(const std::string& name);
// The record of the active plugin with this name; `instance` is null if there is none.
Record active(const std::string& name);
// The reason for which a deactivated plugin is kept permanently; empty if it is not.
std::string why_kept(const std::string& name);
// The number of live objects of a retired plugin that is not destroyed yet; -1 if there is none.
int64_t retired_objects(const std::string& name);
// A "NAME: reason" text for each plugin of this origin that failed or was abandoned.
std::vector<std::string> failures_from(std::string_view origin);
// True if `path` belongs to an abandoned plugin, which must not be called again.
bool is_abandoned(const std::string& path);
// Marks an active plugin as deactivated. A non-empty `reason` says why the plugin is kept
// permanently. The library `kept` stays mapped; null also releases the library kept by an earlier
// deactivation.
void deactivated(const std::string& name, const std::string& reason, std::shared_ptr<Library> kept);

}  // namespace records

}  // namespace te_fl::plugins
