#pragma once

#include <cstdint>

#include "dispatch/call.hpp"

// The door from dispatch to what watches calls. From outside of this room it and barred.hpp are
// included, and nothing else.
namespace te_fl::dispatch {

// run_order(), watched: under TE_FL_VERIFY and TE_FL_TRACE, of which `switches` says what is on.
Status run_watched(Call& call, const Failure* first, uint64_t switches);
// Logs at the process's end who served what, if DEBUG messages are written then.
void summarise_at_exit();

}  // namespace te_fl::dispatch
