#pragma once

#include <string>
#include <vector>

#include "dispatch/call.hpp"

// The interface of the quarantine for dispatch: the implementations that are quarantined.
namespace te_fl::dispatch {

// The op's implementations that are quarantined for calls with this signature.
std::vector<policy::Barred> barred(const OpRow& row, const core::Signature& signature);
// Describes the calls of the op on the device for which an implementation is quarantined, with the
// reasons. Empty if there are none.
std::string quarantined_for(const std::string& op, const std::string& impl_id,
                            const std::string& owner, const Device& device);
// Makes the next choice read the quarantine file again.
void forget_quarantine_file();

}  // namespace te_fl::dispatch
