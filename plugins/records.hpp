// The list of every plugin met in this process.
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
  std::shared_ptr<Instance> instance;  // while active, and for ever if quiesce() failed
  std::weak_ptr<Instance> retired;     // after deactivation, until it is destroyed
  std::weak_ptr<Library> library;      // of an active plugin
  std::shared_ptr<Library> kept;       // keeps a deactivated plugin mapped
  bool is_module = false;              // of a ModuleLoader: there is neither instance nor library
};

// The records. Thread-safe; each function copies.
namespace records {

// Adds a record; it replaces an older one of the same plugin that is neither active, retired nor
// abandoned.
void put(Record record);
// All, built-ins first, with the state as it is now.
std::vector<PluginInfo> list();
// True if there is a record of the built-in backend of a name, in whatever state.
bool has_builtin(const std::string& name);
// The active (also built-in) plugin of a name; `instance` is null if there is none.
Record active(const std::string& name);
// The reason for which the deactivated plugin of a name is kept for ever; empty if there is none.
std::string why_kept(const std::string& name);
// Live objects of the retired plugin of a name that is not destroyed yet; -1 if there is none.
int64_t retired_objects(const std::string& name);
// "NAME: why" of the plugins of this origin that failed or were abandoned; empty if there is none.
std::vector<std::string> failures_from(std::string_view origin);
// True if the file at `path` is an abandoned plugin's, which must not be entered again.
bool is_abandoned(const std::string& path);
// Marks the active plugin of a name as deactivated. `reason` not empty: it stays, for that reason.
// `kept` stays open; null: nothing of an earlier deactivation is kept either.
void deactivated(const std::string& name, const std::string& reason, std::shared_ptr<Library> kept);

}  // namespace records

}  // namespace te_fl::plugins
