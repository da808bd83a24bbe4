#include "policy/vendors.hpp"

#include <algorithm>
#include <mutex>
#include <string>
#include <vector>

#include "core/base/fork.hpp"
#include "policy/text.hpp"

namespace te_fl::policy {
namespace {

struct ShippedAlias {
  std::string_view alias, vendor;
};

// This list is generated from backends/*/*.json.in. It makes the aliases of te-fl's own plugins
// known even if a plugin is loaded by its path without its manifest, so that denying an alias
// denies the plugin.
constexpr ShippedAlias kShipped[] = {
#include "shipped/vendor_aliases.inc"
};

struct FoundAlias {
  std::string alias, vendor;
};

constinit core::ForkMutex aliases_mutex(core::LockLevel::kVendorAliases);
const core::ForkMutex::Registration aliases_registration(aliases_mutex);

// The aliases that manifests declared. The caller holds the mutex.
std::vector<FoundAlias>& found() {
  static auto* const list = new std::vector<FoundAlias>;  // never freed: read until exit
  return *list;
}

// The vendors that a lower-case name refers to: the vendor of that name and the vendors that have
// it as an alias. The caller holds the mutex.
std::vector<std::string> list_vendors(const std::string& name) {
  std::vector<std::string> vendors = {name};
  for (const ShippedAlias& known : kShipped) {
    if (known.alias == name) vendors.emplace_back(known.vendor);
  }
  for (const FoundAlias& known : found()) {
    if (known.alias == name) vendors.push_back(known.vendor);
  }
  return vendors;
}

}  // namespace

bool add_vendor_alias(std::string_view alias, std::string_view vendor) {
  FoundAlias added{lower(alias), lower(vendor)};
  const std::lock_guard lock(aliases_mutex);
  const std::vector<std::string> known = list_vendors(added.alias);
  if (std::find(known.begin(), known.end(), added.vendor) != known.end()) return false;
  found().push_back(std::move(added));
  return true;
}

bool same_vendor(std::string_view a, std::string_view b) {
  const std::string x = lower(a), y = lower(b);
  if (x == y) return true;
  const std::lock_guard lock(aliases_mutex);
  const std::vector<std::string> of_x = list_vendors(x), of_y = list_vendors(y);
  return std::find_first_of(of_x.begin(), of_x.end(), of_y.begin(), of_y.end()) != of_x.end();
}

}  // namespace te_fl::policy
