#pragma once

#include <cstdint>
#include <vector>

#include "dispatch/call.hpp"

// The door from dispatch to what watches calls: nothing else of this room is included from outside
// it.
namespace te_fl::dispatch {

// run_order(), watched: under TE_FL_VERIFY and TE_FL_TRACE, of which `switches` says what is on.
Status run_watched(Call& call, const Failure* first, uint64_t switches);
// The quarantined ones among the op's implementations, which do not serve such a call.
std::vector<policy::Barred> barred(const OpRow& row, const core::Signature& signature);
// The calls of the op on the device for which an implementation is quarantined, with the reasons;
// empty: none.
std::string quarantined_for(const std::string& op, const std::string& impl_id,
                            const std::string& owner, const Device& device);
// Reads the quarantine file again at the next choice.
void forget_quarantine_file();
// Logs at the process's end who served what, if DEBUG messages are written then.
void summarise_at_exit();

}  // namespace te_fl::dispatch
