#pragma once

#include <string>

#include "dispatch/call.hpp"

namespace te_fl::dispatch {

// Tries one implementation: supports(), lock, plan, scratch, run(). Uses copies in host memory if
// `step` is staged. Does not count the call and does not fall back. Returns the implementation's
// status and puts its error text into `errors`.
te_fl_status attempt(const Call& call, const Step& step, bool deterministic,
                     core::ErrorText& errors);

inline bool is_collective(const Call& call) noexcept {
  return (call.row.compiled->schema().flags & TE_FL_SCHEMA_COLLECTIVE) != 0;
}
// Used for a collective when its route is computed without running the call: sets the call's policy
// to that of its communicator, as run_order() does. Returns the communicator's name if its policy
// differs from the thread's; otherwise, and for other ops, an empty name.
std::string follow_communicator(Call& call);

}  // namespace te_fl::dispatch
