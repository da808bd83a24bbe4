#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "te_fl/plugin.h"
#include "te_fl/status.hpp"

// The providers of collectives that plugins have registered (te_fl_comm_desc). One list per
// process, thread-safe.
namespace te_fl::registry {

struct CommProvider {
  std::shared_ptr<void> keep_alive;  // first member, so it is destroyed last
  te_fl_comm_desc desc{};            // a copy that points to `name` and `api` below
  te_fl_comm_api api{};
  std::string name;
  std::string plugin;
  std::string vendor;
  std::string version;           // of the plugin and of its library
  std::atomic<int64_t> live{0};  // number of live communicators
};

// Registers all providers of the list or none. INVALID_ARGUMENT for an invalid descriptor,
// ALREADY_EXISTS for a name that is taken; both errors contain the provider's name.
Status add_comm_providers(std::span<const te_fl_comm_desc* const> list, const std::string& plugin,
                          const std::string& vendor, const std::string& version,
                          const std::shared_ptr<void>& keep_alive);
// Removes the providers of a plugin. BUSY, without any change, while one of their communicators is
// alive.
Status remove_comm_providers(const std::string& plugin);
// All providers, in the order of registration.
std::vector<std::shared_ptr<CommProvider>> comm_providers();

}  // namespace te_fl::registry
