#include "registry/comm_providers.hpp"

#include <algorithm>
#include <iterator>
#include <mutex>

#include "core/base/abi_struct.hpp"
#include "core/base/fork.hpp"
#include "te_fl/policy.hpp"

namespace te_fl::registry {
namespace {

constinit core::ForkMutex providers_mutex(core::LockLevel::kCommProviders);
const core::ForkMutex::Registration providers_registration(providers_mutex);

using Providers = std::vector<std::shared_ptr<CommProvider>>;
// Never destroyed: other threads may use the list while the process ends.
Providers& providers() {
  static auto* const list = new Providers;
  return *list;
}

bool is_name(const char* text) {
  if (text == nullptr || *text == '\0') return false;
  for (const char* c = text; *c != '\0'; ++c) {
    const bool good = (*c >= 'a' && *c <= 'z') || (*c >= '0' && *c <= '9') || *c == '_';
    if (!good) return false;
  }
  return true;
}

int32_t default_priority(uint32_t kind) {
  return kind == TE_FL_KIND_VENDOR    ? TE_FL_PRIORITY_VENDOR
         : kind == TE_FL_KIND_DEFAULT ? TE_FL_PRIORITY_DEFAULT
                                      : TE_FL_PRIORITY_REFERENCE;
}

// Checks a descriptor whose name was checked before, so that messages can use the name.
Status check(const te_fl_comm_desc& desc, const te_fl_comm_api& api, const std::string& who) {
  const auto bad = [&](const std::string& why) { return invalid_argument(who + ": " + why); };
  if (desc.kind > TE_FL_KIND_REFERENCE) return bad("kind is " + std::to_string(desc.kind));
  if (desc.device_types == 0) return bad("it supports no device type (device_types is 0)");
  for (const auto& [slot, there] :
       {std::pair("create", api.create != nullptr), std::pair("destroy", api.destroy != nullptr),
        std::pair("abort", api.abort != nullptr)}) {
    if (!there) return bad(std::string("its table has no ") + slot + "() (rule R4)");
  }
  if ((api.group_start == nullptr) != (api.group_end == nullptr))
    return bad("its table has one of group_start() and group_end(), and needs both or neither");
  return {};
}

Result<std::shared_ptr<CommProvider>> read(const te_fl_comm_desc* raw, uint32_t index) {
  const std::string place = "provider of collectives " + std::to_string(index);
  if (raw == nullptr) return invalid_argument(place + " is NULL");
  if (!core::plausible_size(raw->struct_size, core::kLeastCommDesc)) {
    return invalid_argument(place + ": its descriptor has " +
                            core::size_text(raw->struct_size, core::kLeastCommDesc));
  }
  auto made = std::make_shared<CommProvider>();
  made->desc = core::copy_struct<te_fl_comm_desc>(raw);
  if (!is_name(made->desc.name)) {
    return invalid_argument(
        place + ": its name is " +
        (made->desc.name == nullptr ? "NULL" : "'" + std::string(made->desc.name) + "'") +
        ", must be of a to z, 0 to 9 and _");
  }
  made->name = made->desc.name;
  made->desc.name = made->name.c_str();
  const std::string who = "provider of collectives '" + made->name + "'";
  if (made->desc.api == nullptr) return invalid_argument(who + " has no table of functions");
  if (!core::plausible_size(made->desc.api->struct_size, core::kLeastCommApi)) {
    return invalid_argument(who + ": its table of functions has " +
                            core::size_text(made->desc.api->struct_size, core::kLeastCommApi));
  }
  made->api = core::copy_struct<te_fl_comm_api>(made->desc.api);
  made->desc.api = &made->api;
  TE_FL_RETURN_IF_ERROR(check(made->desc, made->api, who));
  if (made->desc.priority == 0) made->desc.priority = default_priority(made->desc.kind);
  return made;
}

}  // namespace

Status add_comm_providers(std::span<const te_fl_comm_desc* const> list, const std::string& plugin,
                          const std::string& vendor, const std::string& version,
                          const std::shared_ptr<void>& keep_alive) {
  Providers made;
  for (const te_fl_comm_desc* raw : list) {
    TE_FL_ASSIGN_OR_RETURN(std::shared_ptr<CommProvider> one,
                           read(raw, static_cast<uint32_t>(made.size())));
    one->plugin = plugin;
    one->vendor = vendor;
    one->version = version;
    one->keep_alive = keep_alive;
    made.push_back(std::move(one));
  }
  const std::lock_guard lock(providers_mutex);
  for (size_t i = 0; i < made.size(); ++i) {
    const auto same = [&](const auto& p) { return p->name == made[i]->name; };
    const auto others = std::find_if(providers().begin(), providers().end(), same);
    const bool twice = std::any_of(made.begin(), made.begin() + static_cast<ptrdiff_t>(i), same);
    if (others == providers().end() && !twice) continue;
    return Status(StatusCode::kAlreadyExists, "provider of collectives '" + made[i]->name +
                                                  "' is there already, of plugin '" +
                                                  (twice ? plugin : (*others)->plugin) + "'");
  }
  providers().insert(providers().end(), made.begin(), made.end());
  return {};
}

Status remove_comm_providers(const std::string& plugin) {
  Providers gone;  // destroyed after the lock is released
  const std::lock_guard lock(providers_mutex);
  for (const auto& p : providers()) {
    const int64_t live = p->live.load();
    if (p->plugin != plugin || live == 0) continue;
    return Status(StatusCode::kBusy,
                  std::to_string(live) + (live == 1 ? " communicator" : " communicators") +
                      " of its provider '" + p->name + "' are alive; destroy them first");
  }
  const auto first = std::stable_partition(providers().begin(), providers().end(),
                                           [&](const auto& p) { return p->plugin != plugin; });
  gone.assign(std::make_move_iterator(first), std::make_move_iterator(providers().end()));
  providers().erase(first, providers().end());
  return {};
}

std::vector<std::shared_ptr<CommProvider>> comm_providers() {
  const std::lock_guard lock(providers_mutex);
  return providers();
}

}  // namespace te_fl::registry
