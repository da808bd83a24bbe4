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
  std::string path;    // of the library; empty for built-ins
  std::string origin;  // "built-in", "TE_FL_PLUGIN_MODULES", the manifest's path, "load()"
  std::string abi;     // "0.9"
  State state = State::kFailed;
  // The reason it failed, was skipped or is still referenced for; for an active one, the parts of
  // it that were left out.
  std::string reason;
  double load_ms = 0;
  std::vector<std::string> devices;
  std::vector<std::string> ops;    // "op: impl_id"
  std::vector<std::string> comms;  // providers of collectives (CommOptions.provider)
};

// A plugin's finding about its surroundings: a driver, a chip, a library that it opens.
struct Finding {
  enum class Level { kOk, kNote, kProblem } level = Level::kOk;
  std::string subject;   // "NVIDIA driver", "cuda:0"
  std::string state;     // version and path, or what is wrong
  std::string disables;  // the features that do not work because of it; empty: none
  std::string remedy;    // the package to install or the setting to change; empty: none
};

// Every plugin met so far, built-ins first.
TE_FL_API std::vector<PluginInfo> list();
// Loads a library and activates it. `path_or_name` with a '/' is a path; otherwise it is a name
// looked up in the manifests, whose architecture and ABI are checked (but not the probe: it
// was asked for); one that is no manifest's is a module's, if there is a ModuleLoader. After an
// error nothing of the plugin remains loaded, except that one whose create() exceeded
// TE_FL_PLUGIN_TIMEOUT_MS is abandoned: it stays mapped and is never called again. Errors:
// NOT_FOUND (no such file or name), FAILED_PRECONDITION (others can write it, or it is kept for
// ever since its create() or quiesce() failed), INCOMPATIBLE (cannot be opened, or breaks a rule of
// plugin.h, which the message quotes), ALREADY_EXISTS (its name is an active plugin's), BUSY (its
// name is one's that is still referenced), TIMEOUT (abandoned), or its own.
TE_FL_API Result<PluginInfo> load(const std::string& path_or_name);
// Deactivates: no new call enters it, nor any plugin's op on its devices; whoever is inside leaves;
// then it is quiesced and destroyed. If tensors or streams still refer to it, it becomes kRetired
// and is destroyed when the last goes, on the thread that lets it go; until then they can be copied
// from, and nothing else. Calls on its devices, by whatever route, handle or graph, are UNSUPPORTED
// and name the device. The library stays mapped unless `unmap` is true: then it is closed when the
// plugin is destroyed (no thread may keep anything of its code, such as a thread-local object). It
// can be loaded again then. BUSY, and nothing was changed, from inside an op or a device's
// function, or while a stream is captured that worked with a plan that owns device memory (R26),
// its own or another's for a device of it; NOT_FOUND names the active plugins; FAILED_PRECONDITION
// for a built-in one. Any other error is that of its quiesce(), INTERNAL if that said BUSY: it is
// out of service, and stays for ever, since its work may still be running.
TE_FL_API Status deactivate(const std::string& name, bool unmap = false);
// Asks an active plugin for its findings; none if it has nothing to say. May take long: the plugin
// opens the libraries that it would use. NOT_FOUND if no such plugin is active, or the plugin's
// error.
TE_FL_API Result<std::vector<Finding>> diagnose(const std::string& name);
// Words about the last status that a plugin's function has answered since this was asked before and
// that is none (R6): its code is unknown, or it marks TE_FL_OK with TE_FL_CLEAN. Empty if there was
// none. For tools that judge plugins; the host took it for TE_FL_INTERNAL, or for TE_FL_OK.
TE_FL_API std::string take_odd_status();
// The last setting that a plugin asked the host for since this was asked before, and that neither
// te-fl has nor the plugin declared (R21); the host answered that it is unset, or what another
// plugin's is. Empty if there was none. For tools that judge plugins.
TE_FL_API std::string take_undeclared_setting();
// Where manifests are looked for, in order, with what was found.
TE_FL_API std::vector<std::string> search_path();

// Loads plugins that are no shared libraries: modules of a language whose interpreter this process
// has. The interpreter's package sets it when it is imported, before the first op.
struct ModuleLoader {
  // Loads the modules of these names, in order, and then, if `discover`, those that installed
  // packages offer, except what `skip` names. One entry for each: active; skipped, if there is no
  // such module (then without a path) or it does not want to serve here; failed. Its ops are in
  // OpRegistry::instance(), owned by its name. May be called by any thread; throws nothing.
  std::vector<PluginInfo> (*load)(const std::vector<std::string>& names, bool discover,
                                  const std::vector<std::string>& skip) = nullptr;
};
// TE_FL_PLUGIN_MODULES' names that are no manifest's then go to `loader`, and so do those of
// load(). deactivate() takes out a module's ops; load() has the module register them again.
TE_FL_API void set_module_loader(ModuleLoader loader) noexcept;

}  // namespace te_fl::plugins
