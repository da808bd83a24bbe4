// Names of vendors, and their aliases from manifests.
#pragma once

#include <string_view>

namespace te_fl::policy {

// Adds an alias of a vendor, case-insensitive. False if the vendor had the alias already. Several
// vendors may share an alias. The aliases in manifests of te-fl's own plugins are always known,
// even if these plugins are not built or not found. Thread-safe. Does not invalidate cached choices
// of implementations; registry::choose_again() does.
bool add_vendor_alias(std::string_view alias, std::string_view vendor);

// True if both names refer to a common vendor, case-insensitive. Thread-safe.
bool same_vendor(std::string_view a, std::string_view b);

}  // namespace te_fl::policy
