#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "te_fl/plugin.h"
#include "te_fl/status.hpp"

// The providers of collectives that plugins brought (te_fl_comm_desc). One list in a process,
// thread-safe.
namespace te_fl::registry {

struct CommProvider {
  std::shared_ptr<void> keep_alive;  // declared first: released last
  te_fl_comm_desc desc{};            // a copy; its name is the one below, its table `api`
  te_fl_comm_api api{};
  std::string name;
  std::string plugin;
  std::string vendor;
  std::string version;           // of the plugin, and of the library behind it
  std::atomic<int64_t> live{0};  // communicators
};

// All or nothing. INVALID_ARGUMENT for a descriptor that breaks a rule, ALREADY_EXISTS for a name
// that is taken; both name the provider.
Status add_comm_providers(std::span<const te_fl_comm_desc* const> list, const std::string& plugin,
                          const std::string& vendor, const std::string& version,
                          const std::shared_ptr<void>& keep_alive);
// Those of a plugin leave the list. BUSY, and nothing was changed, while a communicator of theirs
// is alive.
Status remove_comm_providers(const std::string& plugin);
// All, in the order in which they came.
std::vector<std::shared_ptr<CommProvider>> comm_providers();

}  // namespace te_fl::registry
