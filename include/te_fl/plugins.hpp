#pragma once

#include <string>
#include <string_view>
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
  std::string path;    // path of the library; empty for built-ins
  std::string origin;  // "built-in", "TE_FL_PLUGIN_MODULES", the manifest's path, "load()"
  std::string abi;     // "0.9"
  State state = State::kFailed;
  // The reason why the plugin failed, was skipped or is still referenced. For an active plugin, the
  // parts of it that were left out.
  std::string reason;
  double load_ms = 0;
  std::vector<std::string> devices;
  std::vector<std::string> ops;    // "op: impl_id" of each implementation
  std::vector<std::string> comms;  // names of its providers of collectives (CommOptions.provider)
};

// Something that a plugin found in its environment, such as a driver, a chip, or a library that it
// opens.
struct Finding {
  enum class Level { kOk, kNote, kProblem } level = Level::kOk;
  std::string subject;   // "NVIDIA driver", "cuda:0"
  std::string state;     // version and path, or what is wrong
  std::string disables;  // the features that do not work for this reason; empty: none
  std::string remedy;    // the package to install or the setting to change; empty: none
};

// Every plugin that the process has encountered, built-ins first.
TE_FL_API std::vector<PluginInfo> list();
// Loads a library and activates it. `path_or_name` with a '/' is a path. Otherwise it is a name,
// which is looked up in the manifests. The manifest's architecture and ABI are checked, but not its
// probe, because the caller asked for this plugin explicitly. A name without a manifest is passed
// to the ModuleLoader, if there is one.
//
// After an error nothing of the plugin remains loaded, with one exception: if create() exceeds
// TE_FL_PLUGIN_TIMEOUT_MS, the plugin is abandoned, stays mapped and is never called again. Errors:
// NOT_FOUND (no such file or name), FAILED_PRECONDITION (other users can write the file, or the
// plugin stays mapped for ever because its create() or quiesce() failed), INCOMPATIBLE (the library
// cannot be opened or breaks a rule of plugin.h, which the message quotes), ALREADY_EXISTS (an
// active plugin has this name), BUSY (a deactivated plugin with this name is still referenced),
// TIMEOUT (abandoned), or the plugin's own error.
TE_FL_API Result<PluginInfo> load(const std::string& path_or_name);
// Deactivates a plugin. New calls into the plugin, and other plugins' ops on its devices, are
// refused; calls in progress are waited for; then the plugin is quiesced and destroyed. If tensors
// or streams still refer to it, the plugin becomes kRetired. It is then destroyed when the last of
// them is released, on the thread that releases it; until then such tensors can be copied from, and
// nothing else. All other calls on its devices, also through handles and graphs, return UNSUPPORTED
// and name the device.
//
// The library stays mapped, unless `unmap` is true: then it is closed when the plugin is destroyed,
// and no thread may still use anything from its code, such as a thread-local object. After
// deactivation the plugin can be loaded again.
//
// Errors: BUSY, with nothing changed, if called from inside an op or a device function, or while a
// stream is being captured that used a plan with device memory (R26), where the plan belongs to the
// plugin or to one of its devices. NOT_FOUND names the active plugins. FAILED_PRECONDITION for a
// built-in plugin. Any other error comes from the plugin's quiesce() (a BUSY from quiesce() becomes
// INTERNAL): the plugin is then out of service but stays loaded for ever, since its work may still
// be running.
TE_FL_API Status deactivate(const std::string& name, bool unmap = false);
// Asks an active plugin for its findings; the result may be empty. May take long, because the
// plugin opens the libraries that it would use. NOT_FOUND if no such plugin is active; otherwise
// the plugin's error.
TE_FL_API Result<std::vector<Finding>> diagnose(const std::string& name);
// Describes the last invalid status (R6) that a plugin's function has returned since the previous
// call of this function: an unknown code, or TE_FL_OK with TE_FL_CLEAN. Empty if there was none.
// The host treats such a status as TE_FL_INTERNAL or TE_FL_OK, respectively. For tools that check
// plugins.
TE_FL_API std::string take_status_misuse();
// The last setting that a plugin has requested from the host since the previous call of this
// function although neither te-fl nor the plugin declares it (R21). Empty if there was none. The
// host answered that the setting is unset, or returned the value that another plugin's setting of
// this name has. For tools that check plugins.
TE_FL_API std::string take_undeclared_setting();
// The places searched for manifests, in order, each with what was found there.
TE_FL_API std::vector<std::string> search_path();

// Returns a sentence that names the file, folder or link of the path that another user may change,
// with a remedy: code at the path must not be executed then. Empty if no other user can.
TE_FL_API std::string trust_problem(const std::string& path);

// Loads plugins that are not shared libraries but modules of a language whose interpreter runs in
// this process (Python). The interpreter's package installs the loader when it is imported, before
// the first op.
struct ModuleLoader {
  // Loads the modules with these names, in order, and then, if `discover`, the modules that
  // installed packages offer, except those in `skip`. Returns one entry per module. Its state is
  // active; or skipped, if no such module exists (the path is then empty) or the module declines to
  // run here; or failed. The ops of an active module are in OpRegistry::instance(), with the
  // module's name as owner. Any thread may call this function; it throws nothing.
  std::vector<PluginInfo> (*load)(const std::vector<std::string>& names, bool discover,
                                  const std::vector<std::string>& skip) = nullptr;
};
// Installs a loader. From then on it receives the names in TE_FL_PLUGIN_MODULES and in load() for
// which there is no manifest. deactivate() unregisters a module's ops; load() makes the module
// register them again.
TE_FL_API void set_module_loader(ModuleLoader loader) noexcept;

}  // namespace te_fl::plugins
