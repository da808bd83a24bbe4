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
// Reads the quarantine file again at the next choice.
void forget_quarantine_file();
// Logs at the process's end who served what, if DEBUG messages are written then.
void summarise_at_exit();

}  // namespace te_fl::dispatch
