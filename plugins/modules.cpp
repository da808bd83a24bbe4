#include "plugins/modules.hpp"

#include <algorithm>
#include <atomic>

#include "core/base/text.hpp"
#include "plugins/records.hpp"
#include "plugins/split_list.hpp"
#include "te_fl/environment.hpp"
#include "te_fl/log.hpp"

namespace te_fl::plugins {
namespace {

constexpr const char* kModulesSetting = "TE_FL_PLUGIN_MODULES";
constexpr const char* kSkip = "TE_FL_SKIP_MODULES";

std::atomic<decltype(ModuleLoader::load)> g_load{nullptr};

void record(const PluginInfo& info) {
  Record made{info, nullptr, {}, {}, {}};
  made.is_module = true;
  records::put(std::move(made));
}

std::string how_to_silence(const PluginInfo& info) {
  return info.origin == kModulesSetting
             ? "leave it out of " + std::string(kModulesSetting)
             : "uninstall the package, or name the module in " + std::string(kSkip);
}

}  // namespace

void set_module_loader(ModuleLoader loader) noexcept { g_load.store(loader.load); }

namespace modules {

bool any() noexcept { return g_load.load() != nullptr; }

void start(const std::vector<std::string>& named, const std::vector<std::string>& manifests) {
  const std::vector<std::string> skip = split_list(environment::get_if_set(kSkip).value_or(""));
  const auto is_skipped = [&](const std::string& name) {
    return std::find(skip.begin(), skip.end(), name) != skip.end();
  };
  std::vector<std::string> wanted = named;
  std::erase_if(wanted, is_skipped);
  for (PluginInfo& info : g_load.load()(wanted, !is_skipped("*"), skip)) {
    const bool was_named = std::find(named.begin(), named.end(), info.name) != named.end();
    if (was_named) info.origin = kModulesSetting;
    // A name in TE_FL_PLUGIN_MODULES that neither a module nor a manifest has is an error once a
    // loader is set.
    if (was_named && info.state == State::kSkipped && info.path.empty()) {
      info.state = State::kFailed;
      info.reason += ", and no manifest has the name" + core::did_you_mean(info.name, manifests);
    }
    record(info);
    if (info.state == State::kFailed) {
      log::warning("plugin module " + info.name + " (" + info.origin + ") was not loaded: " +
                   info.reason + "; to do without it, " + how_to_silence(info));
    } else if (info.state == State::kSkipped) {
      log::info("plugin module " + info.name + " (" + info.origin + ") left out: " + info.reason);
    }
  }
}

Result<PluginInfo> load(const std::string& name) {
  if (!records::active(name).info.name.empty())
    return Status(StatusCode::kAlreadyExists, "plugin '" + name + "' is active already");
  std::vector<PluginInfo> loaded = g_load.load()({name}, false, {});
  if (loaded.empty())
    return failed_precondition("module '" + name + "' cannot be loaded: its interpreter is ending");
  PluginInfo& info = loaded.front();
  info.origin = "load()";
  const std::string text = "plugin module '" + name + "': " + info.reason;
  if (info.state == State::kSkipped && info.path.empty()) return not_found(text);
  record(info);
  if (info.state == State::kActive) return info;
  return Status(
      info.state == State::kSkipped ? StatusCode::kUnsupported : StatusCode::kIncompatible, text);
}

}  // namespace modules
}  // namespace te_fl::plugins
