#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "registry/comm_providers.hpp"
#include "te_fl/comm.hpp"
#include "te_fl/policy.hpp"

namespace te_fl::comm {

// The provider that the policy ranks first for the device, or the one that was named. `processes`:
// ranks may be in other processes. NOT_FOUND lists the providers with the reason for which each is
// none.
Result<std::shared_ptr<registry::CommProvider>> choose_provider(const Device& device,
                                                                const PolicySettings& settings,
                                                                const std::string& named,
                                                                bool processes);
// Op and impl_id of the implementation that the policy chooses for each collective among those of
// the provider's plugin.
std::vector<std::pair<std::string, std::string>> choose_implementations(
    const registry::CommProvider& provider, const PolicySettings& settings, const Device& device);

}  // namespace te_fl::comm
