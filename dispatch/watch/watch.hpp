#pragma once

#include <cstdint>
#include <vector>

#include "dispatch/call.hpp"

// Where dispatch reaches what watches calls: nothing else of this room is included from outside it.
namespace te_fl::dispatch {

// run_order(), watched: under TE_FL_VERIFY and TE_FL_TRACE, of which `care` says what is on.
Status run_watched(Call& call, const Failure* first, uint64_t care);
// The quarantined ones among the op's implementations, which do not serve such a call.
std::vector<policy::Barred> barred(const OpRow& row, const core::Signature& signature);
// What of the op's calls on the device an implementation is quarantined for, with the reasons;
// empty: nothing.
std::string quarantined_for(const std::string& op, const std::string& impl_id,
                            const std::string& owner, const Device& device);
// Reads the quarantine file again at the next choice.
void forget_quarantine_file();
// Logs at the process's end who served what, if DEBUG messages are written then.
void summarise_at_exit();

}  // namespace te_fl::dispatch
