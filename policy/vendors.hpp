// Names of vendors, and the other names that manifests give them.
#pragma once

#include <string_view>

namespace te_fl::policy {

// Lets the vendor answer to `alias` as well, in any case, from now on. False if it did already. An
// alias may stand for several vendors. The aliases in the manifests of te-fl's own plugins are
// known from the start, also if these plugins are not built or not found. Thread-safe. What was
// chosen before stays chosen: registry::choose_again() makes it be chosen anew.
bool add_vendor_alias(std::string_view alias, std::string_view vendor);

// True if both are names of one vendor, in any case. Thread-safe.
bool same_vendor(std::string_view a, std::string_view b);

}  // namespace te_fl::policy
