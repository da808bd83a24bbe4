#pragma once

#include <string>
#include <vector>

#include "dispatch/call.hpp"

// The door from dispatch to the quarantine: which implementations it keeps from serving.
namespace te_fl::dispatch {

// The quarantined ones among the op's implementations, which do not serve such a call.
std::vector<policy::Barred> barred(const OpRow& row, const core::Signature& signature);
// The calls of the op on the device for which an implementation is quarantined, with the reasons;
// empty: none.
std::string quarantined_for(const std::string& op, const std::string& impl_id,
                            const std::string& owner, const Device& device);
// Reads the quarantine file again at the next choice.
void forget_quarantine_file();

}  // namespace te_fl::dispatch
