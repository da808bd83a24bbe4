#pragma once

#include <cstdint>

#include "dispatch/call.hpp"

// The interface between dispatch and the observers of calls. Code outside of this folder includes
// only this header and barred.hpp.
namespace te_fl::dispatch {

// Calls run_order() with the observers of `switches`: TE_FL_VERIFY and TE_FL_TRACE.
Status run_watched(Call& call, const Failure* first, uint64_t switches);
// At process exit, logs the number of calls of each op by implementation, if DEBUG messages are
// enabled.
void summarise_at_exit();

}  // namespace te_fl::dispatch
