#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "registry/comm_providers.hpp"
#include "te_fl/comm.hpp"
#include "te_fl/policy.hpp"

namespace te_fl::comm {

// Chooses the provider with the given name, or else the provider that the policy ranks first for
// the device. `processes`: ranks may be in other processes. NOT_FOUND lists the providers and the
// reason for which each cannot be used.
Result<std::shared_ptr<registry::CommProvider>> choose_provider(const Device& device,
                                                                const PolicySettings& settings,
                                                                const std::string& named,
                                                                bool processes);
// Returns (op, impl_id) for each collective, where impl_id is the policy's choice among the
// implementations of the provider's plugin.
std::vector<std::pair<std::string, std::string>> choose_implementations(
    const registry::CommProvider& provider, const PolicySettings& settings, const Device& device);

}  // namespace te_fl::comm
