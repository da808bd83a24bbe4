#include "plugins/loader.hpp"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <mutex>
#include <new>

#include "core/base/best_effort.hpp"
#include "core/base/file.hpp"
#include "core/base/fork.hpp"
#include "core/base/plugin_settings.hpp"
#include "core/base/process_end.hpp"
#include "core/base/text.hpp"
#include "core/device/inside.hpp"
#include "plugins/activate.hpp"
#include "plugins/file_trust.hpp"
#include "plugins/library.hpp"
#include "plugins/load_trust.hpp"
#include "plugins/load_turn.hpp"
#include "plugins/preflight.hpp"
#include "plugins/records.hpp"
#include "plugins/time_limit.hpp"
#include "te_fl/environment.hpp"
#include "te_fl/log.hpp"
#include "te_fl/version.hpp"

namespace te_fl::plugins {
namespace {

using Clock = std::chrono::steady_clock;

Status unfit(std::string text) { return Status(StatusCode::kIncompatible, std::move(text)); }

// One attempt to load a plugin: its data so far, and the result.
struct Attempt {
  const LoadRequest& request;
  OpRegistry& registry;
  PluginInfo info;
  ElfInfo elf;
  bool was_mapped = false;
  std::weak_ptr<Library> library;
  std::shared_ptr<Instance> instance;
};

std::string abi_text(unsigned major, unsigned minor) {
  return std::to_string(major) + "." + std::to_string(minor);
}

// Checks the manifest's claims before the library is opened.
Status check_manifest(const Manifest& manifest) {
  const std::string host = host_architecture();
  if (!manifest.arch.empty() && manifest.arch != host) {
    return unfit("its manifest says it is for " + manifest.arch + ", and this process is " + host +
                 "; install the plugin's build for " + host);
  }
  const auto major = static_cast<unsigned>(manifest.abi_major);
  const auto minor = static_cast<unsigned>(manifest.abi_minor);
  if (const std::string why = version_problem(major, minor); !why.empty()) {
    return unfit("its manifest says plugin ABI " + abi_text(major, minor) +
                 ", and this te-fl " TE_FL_VERSION " speaks " +
                 abi_text(TE_FL_ABI_MAJOR, TE_FL_ABI_MINOR) + "; " + why);
  }
  return {};
}

// True for a truncated file or one with invalid tables. The dynamic loader would map such a file
// and crash.
bool would_crash_the_loader(const ElfInfo& elf) {
  return elf.kind == ElfKind::kTruncated || elf.kind == ElfKind::kCorrupt;
}

// Checks everything that must hold before code of the plugin runs: no other user may control what
// is loaded. Whether the library can be loaded is left to the dynamic loader.
Status check_file(Attempt& attempt) {
  const std::string& path = attempt.request.path;
  if (records::is_abandoned(path)) {
    return failed_precondition(
        "it was abandoned earlier in this process, since its create() did not return (rule R14); "
        "it "
        "may be tried again in a new process");
  }
  attempt.elf = inspect_elf(path, ElfDepth::kHeaders);
  attempt.info.build_id = attempt.elf.build_id;
  if (attempt.elf.kind == ElfKind::kMissing) return not_found(path + " " + attempt.elf.problem);
  const auto not_trusted = [](const std::string& problem) {
    return failed_precondition("it is not trusted: " + problem);
  };
  std::string problem = file_trust_problem(path);
  if (!problem.empty()) return not_trusted(problem);
  const Manifest* manifest = attempt.request.manifest;
  if (manifest != nullptr) TE_FL_RETURN_IF_ERROR(check_manifest(*manifest));
  if (would_crash_the_loader(attempt.elf)) return unfit(path + " " + attempt.elf.problem);
  problem = load_trust_problem(path, SearchRules::of_process());
  return problem.empty() ? Status() : not_trusted(problem);
}

// Explains a failed dlopen(). The dynamic loader reports only its first error; reading the files
// finds all errors, with the objects that need each library and the package to install.
Status explain(const LoadRequest& request, const std::string& loader_text) {
  std::span<const LibraryPackage> packages;
  if (request.manifest != nullptr) packages = request.manifest->packages;
  const PreflightReport report =
      preflight(request.path, TE_FL_PLUGIN_QUERY_SYMBOL, SearchRules::of_process(), packages);
  if (report.ok()) return unfit(loader_text);
  return unfit(report.to_string() + "\n  the dynamic loader: " + loader_text);
}

Status check_names(const Attempt& attempt, const Header& header) {
  const Manifest* manifest = attempt.request.manifest;
  if (manifest != nullptr && manifest->name != header.name) {
    return unfit("its manifest calls it '" + manifest->name + "', and the library says '" +
                 header.name + "'; correct " + manifest->path);
  }
  if (manifest != nullptr && core::lower(manifest->vendor) != core::lower(header.vendor)) {
    return unfit("its manifest names the vendor '" + manifest->vendor + "', and the library '" +
                 header.vendor + "'; correct " + manifest->path);
  }
  if (const Record present = records::active(header.name); present.instance != nullptr) {
    if (present.info.origin == "built-in") {
      return Status(StatusCode::kAlreadyExists,
                    "'" + header.name +
                        "' is the name of a backend that is part of te-fl, which stays; give the "
                        "plugin another name");
    }
    return Status(StatusCode::kAlreadyExists, "a plugin of the name '" + header.name +
                                                  "' is active already, from " + present.info.path +
                                                  "; deactivate it first");
  }
  if (const std::string why = records::why_kept(header.name); !why.empty()) {
    return failed_precondition("the plugin '" + header.name +
                               "' was deactivated and stays in this process, since its quiesce() "
                               "failed (" +
                               why + "); it can be loaded in a new process");
  }
  if (const int64_t objects = records::retired_objects(header.name); objects >= 0) {
    return Status(StatusCode::kBusy,
                  "the plugin '" + header.name + "' was deactivated and is still referenced by " +
                      std::to_string(objects) + " live objects; free them first");
  }
  return {};
}

// Compares the settings of manifest and header. A manifest may omit them, but must otherwise list
// the header's settings.
Status check_settings(const Attempt& attempt, const Header& header) {
  const Manifest* manifest = attempt.request.manifest;
  if (manifest == nullptr || manifest->settings.empty() || manifest->settings == header.settings) {
    return {};
  }
  const auto lacks = [](const std::vector<core::PluginSetting>& list,
                        const core::PluginSetting& setting) {
    return std::find(list.begin(), list.end(), setting) == list.end();
  };
  std::vector<std::string> names;
  for (const core::PluginSetting& s : manifest->settings) {
    if (lacks(header.settings, s)) names.push_back(s.name);
  }
  for (const core::PluginSetting& s : header.settings) {
    const bool known = std::find(names.begin(), names.end(), s.name) != names.end();
    if (!known && lacks(manifest->settings, s)) names.push_back(s.name);
  }
  if (names.empty()) return {};  // only their order differs
  return unfit("its manifest and the library declare its settings differently (rule R21): " +
               core::join(names) + "; correct " + manifest->path);
}

void fill_info(const Header& header, PluginInfo& info) {
  info.name = header.name;
  info.vendor = header.vendor;
  info.version = header.version;
  info.abi = abi_text(header.abi_major, header.abi_minor);
  if (!header.build_id.empty()) info.build_id = header.build_id;
}

std::chrono::milliseconds time_limit() {
  const Result<std::string> value = environment::get("TE_FL_PLUGIN_TIMEOUT_MS");
  const int64_t ms = value.ok() ? std::strtoll(value->c_str(), nullptr, 10) : 0;
  return std::chrono::milliseconds(ms > 0 ? ms : 10000);
}

// Opens the library and activates the plugin. On return the library is closed, unless the instance
// or a hanging create() keeps it.
Status open_and_activate(Attempt& attempt) {
  if (const Status regular = core::check_regular(attempt.request.path); !regular.ok())
    return unfit(regular.message());
  attempt.was_mapped = is_mapped(attempt.request.path);
  Result<std::shared_ptr<Library>> opened = Library::open(attempt.request.path);
  if (!opened.ok()) return explain(attempt.request, opened.status().message());
  const std::shared_ptr<Library> library = std::move(*opened);
  const auto query =
      reinterpret_cast<te_fl_plugin_query_fn>(library->symbol(TE_FL_PLUGIN_QUERY_SYMBOL));
  if (query == nullptr) {
    return explain(attempt.request, "it does not define " TE_FL_PLUGIN_QUERY_SYMBOL " (rule R1)");
  }
  TE_FL_ASSIGN_OR_RETURN(const Header header, read_header(query));
  fill_info(header, attempt.info);
  if (header.name == attempt.request.leave_out) {
    attempt.info.state = State::kSkipped;
    return failed_precondition("the settings leave it out");
  }
  TE_FL_RETURN_IF_ERROR(check_names(attempt, header));
  TE_FL_RETURN_IF_ERROR(check_settings(attempt, header));
  TE_FL_RETURN_IF_ERROR(broken_rule(core::declare_settings(header.name, header.settings, true)));
  ActivateOptions options;
  options.library = library;
  const auto limit = time_limit();
  options.run_create = [&](std::function<te_fl_status()> create) {
    const LimitedCall call = run_with_limit(std::move(create), limit);
    if (call.timed_out) {
      library->keep_mapped();
      attempt.info.state = State::kAbandoned;
      return call.status;
    }
    // A plugin's TIMEOUT becomes INTERNAL, since TIMEOUT here means that create() is still running.
    const bool own = TE_FL_STATUS_CODE(call.status) == TE_FL_TIMEOUT;
    return own ? static_cast<te_fl_status>(TE_FL_INTERNAL) : call.status;
  };
  Result<std::shared_ptr<Instance>> instance =
      activate(query, attempt.registry, std::move(options));
  if (!instance.ok()) {
    if (attempt.info.state != State::kAbandoned) return instance.status();
    return Status(StatusCode::kTimeout,
                  "create() did not return within " + std::to_string(limit.count()) +
                      " ms (TE_FL_PLUGIN_TIMEOUT_MS, rule R14); it is abandoned: it stays mapped "
                      "and is never called again");
  }
  attempt.instance = std::move(*instance);
  attempt.library = library;
  return {};
}

// A note for the user if dlclose() did not unmap the library, with the reason.
std::string left_mapped(const Attempt& attempt) {
  if (attempt.was_mapped || !is_mapped(attempt.request.path)) return {};
  const std::vector<std::string> unique = inspect_elf(attempt.request.path).unique;
  return std::string("; its library stays mapped: ") +
         (unique.empty() ? "it was linked with -z nodelete, or a thread-local object or a device's "
                           "memory still needs it"
                         : "it defines unique symbols such as " + unique.front() +
                               " (build it with -fno-gnu-unique)");
}

double milliseconds_since(Clock::time_point began) {
  return std::chrono::duration<double, std::milli>(Clock::now() - began).count();
}

std::string milliseconds(double ms) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f ms", ms);
  return text;
}

void log_outcome(const PluginInfo& info) {
  const std::string who = "plugin " + info.name;
  if (info.state == State::kActive) {
    log::debug(who + " " + info.version + " (vendor " + info.vendor + ") loaded from " + info.path +
               " in " + milliseconds(info.load_ms) + ": " + std::to_string(info.ops.size()) +
               " implementations, " + std::to_string(info.devices.size()) + " devices");
  } else if (info.state == State::kSkipped) {
    log::debug(who + " (" + info.path + ") left out: " + info.reason);
  } else {
    log::warning(who + " (" + info.path + ", from " + info.origin + ") not loaded: " + info.reason);
  }
}

// An error for a thread that is inside an op or a device function. A deactivation waits until all
// threads are outside, so that thread would wait for itself.
Status check_caller(const char* what) {
  if (core::is_inside()) {
    return Status(StatusCode::kBusy,
                  std::string("a plugin cannot be ") + what +
                      " from inside an op or a function of a device; do it after "
                      "the call returned");
  }
  if (!LoadTurn::mine()) return {};
  return failed_precondition(std::string("a plugin cannot be ") + what +
                             " from inside an entry of another one; do it after that returned");
}

std::string stem(const std::string& path) {
  std::string name = std::filesystem::path(path).stem().string();
  for (const char* prefix : {"lib", "te_fl_"}) {
    if (name.starts_with(prefix)) name.erase(0, std::string_view(prefix).size());
  }
  return name;
}

// Records an active plugin and returns the result of load_library(). If there is no memory for the
// record, withdraws the plugin, since a plugin without a record could not be deactivated.
Result<PluginInfo> active_one(Attempt& attempt) {
  PluginInfo& info = attempt.info;
  try {
    info.state = State::kActive;
    for (const Device& d : attempt.instance->devices()) info.devices.push_back(to_string(d));
    info.ops = attempt.instance->ops();
    info.comms = attempt.instance->comms();
    info.reason = attempt.instance->remark();
    Result<PluginInfo> answer = info;
    records::put({info, attempt.instance, {}, attempt.library, {}});
    return answer;
  } catch (const std::bad_alloc&) {
    core::best_effort([&] { (void)withdraw(attempt.instance, attempt.registry); });
    core::best_effort([&] { core::leave_out_settings(info.name); });
    throw;
  }
}

Result<PluginInfo> failed_one(Attempt& attempt, const Status& status) {
  PluginInfo& info = attempt.info;
  info.reason = innermost_reason(status);
  if (info.state == State::kFailed) info.reason += left_mapped(attempt);
  if (records::active(info.name).instance == nullptr) core::leave_out_settings(info.name);
  records::put({info, nullptr, {}, attempt.library, {}});
  return Status(status.code(), "plugin " + attempt.request.path + ": " + info.reason);
}

}  // namespace

Result<PluginInfo> load_library(const LoadRequest& request, OpRegistry& registry) {
  TE_FL_RETURN_IF_ERROR(check_caller("loaded"));
  const LoadTurn turn;
  if (core::ends_elsewhere()) return core::process_ends("no plugin is loaded");
  if (request.still_wanted && !request.still_wanted()) {
    return failed_precondition("plugin " + request.path + " is loaded already");
  }
  const Clock::time_point began = Clock::now();
  Attempt attempt{request, registry, {}, {}, false, {}, {}};
  PluginInfo& info = attempt.info;
  info.name = request.manifest != nullptr ? request.manifest->name : stem(request.path);
  if (request.manifest != nullptr) info.vendor = request.manifest->vendor;
  info.path = request.path;
  info.origin = request.origin;
  Status status = check_file(attempt);
  if (status.ok()) status = open_and_activate(attempt);
  info.load_ms = milliseconds_since(began);
  Result<PluginInfo> answer = status.ok() ? active_one(attempt) : failed_one(attempt, status);
  core::best_effort([&] { log_outcome(info); });
  return answer;
}

namespace {

// fork() waits for this mutex, so a child never has a partly loaded backend.
constinit core::ForkMutex builtins_mutex(core::LockLevel::kBuiltins);
const core::ForkMutex::Registration builtins_registration(builtins_mutex);

}  // namespace

void load_builtin(const char* name, te_fl_plugin_query_fn query, OpRegistry& registry) {
  const LoadTurn turn;
  if (core::ends_elsewhere()) return;
  const std::lock_guard lock(builtins_mutex);
  if (records::has_builtin(name)) return;
  const Clock::time_point began = Clock::now();
  PluginInfo info;
  info.name = name;
  info.origin = "built-in";
  Result<std::shared_ptr<Instance>> instance = activate(query, registry);
  if (instance.ok()) {
    fill_info((*instance)->header(), info);
    info.state = State::kActive;
    info.ops = (*instance)->ops();
    info.comms = (*instance)->comms();
  } else {
    info.reason = innermost_reason(instance.status());
    log::error("built-in backend " + info.name + ": " + info.reason);
  }
  info.load_ms = milliseconds_since(began);
  records::put({std::move(info), instance.ok() ? *instance : nullptr, {}, {}, {}});
}

Status deactivate_plugin(const std::string& name, bool unmap, OpRegistry& registry) {
  TE_FL_RETURN_IF_ERROR(check_caller("deactivated"));
  const LoadTurn turn;
  if (core::ends_elsewhere()) return core::process_ends("no plugin is deactivated");
  Record record = records::active(name);
  if (record.is_module) {
    TE_FL_RETURN_IF_ERROR(registry.unregister_owner(name));
    records::deactivated(name, "", nullptr);
    log::info("plugin module " + name + " deactivated");
    return {};
  }
  if (record.instance == nullptr) {
    std::vector<std::string> names;
    for (const PluginInfo& info : records::list()) {
      if (info.state == State::kActive) names.push_back(info.name);
    }
    return not_found("there is no active plugin '" + name + "'" + core::did_you_mean(name, names) +
                     " (active: " + (names.empty() ? "none" : core::join(names)) + ")");
  }
  if (record.info.origin == "built-in") {
    return failed_precondition("'" + name +
                               "' is built in and cannot be deactivated; a policy can keep it from "
                               "being chosen (TE_FL_PER_OP)");
  }
  const Status status = withdraw(record.instance, registry);
  if (!record.instance->withdrawn()) return status;  // nothing was changed
  records::deactivated(name, status.ok() ? "" : innermost_reason(status),
                       unmap ? nullptr : record.library.lock());
  core::best_effort([&] {
    core::leave_out_settings(name);
    log::info("plugin " + name + " deactivated" +
              (status.ok() ? "" : ", but: " + innermost_reason(status)));
  });
  return status;
}

}  // namespace te_fl::plugins
