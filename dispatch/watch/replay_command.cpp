#include "dispatch/watch/replay_command.hpp"

#include <algorithm>
#include <cctype>
#include <filesystem>

#include "plugins/records.hpp"

namespace te_fl::dispatch {
namespace {

// Quotes a word for a shell.
std::string word(const std::string& text) {
  const bool plain = !text.empty() && std::all_of(text.begin(), text.end(), [](unsigned char c) {
    return std::isalnum(c) != 0 || std::string_view("/._-+=:@%").find(c) != std::string_view::npos;
  });
  if (plain) return text;
  std::string quoted = "'";
  for (const char c : text) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return quoted + "'";
}

}  // namespace

std::string replay_command(const std::string& owner, const std::string& file) {
  std::string command = "te-fl replay " + word(file);
  for (const plugins::PluginInfo& info : plugins::records::list()) {
    if (info.name != owner || info.state != plugins::State::kActive) continue;
    // A plugin with a manifest is found again in the same way.
    const bool found_by_itself = info.path.empty() || info.origin.ends_with(".json") ||
                                 info.origin.starts_with("entry point ");
    if (found_by_itself) return command;
    if (info.abi != "Python") return "TE_FL_PLUGIN_MODULES=" + word(info.path) + " " + command;
    // A module is found by its name, in the folder above its package.
    std::filesystem::path folder = std::filesystem::path(info.path).parent_path();
    if (info.path.ends_with("__init__.py")) folder = folder.parent_path();
    for (const char c : info.name)
      if (c == '.') folder = folder.parent_path();
    return "PYTHONPATH=" + word(folder.string()) + "${PYTHONPATH:+:$PYTHONPATH}" +
           " TE_FL_PLUGIN_MODULES=" + word(info.name) + " " + command;
  }
  return command;
}

}  // namespace te_fl::dispatch
