#pragma once

#include <string>

#include "dispatch/call.hpp"

namespace te_fl::dispatch {

// Tries one implementation: supports(), lock, plan, scratch, run(); on copies in host memory if
// `step` says so. Neither counts nor falls back. The status is the implementation's; its words go
// to `errors`.
te_fl_status attempt(const Call& call, const Step& step, bool deterministic,
                     core::ErrorText& errors);

inline bool is_collective(const Call& call) noexcept {
  return (call.row.compiled->schema().flags & TE_FL_SCHEMA_COLLECTIVE) != 0;
}
// Before a collective is chosen for without being run: sets the call's policy to that of its
// communicator, as run_order() does. Returns the communicator's name if that is another than the
// thread's; empty for every other op.
std::string follow_communicator(Call& call);

}  // namespace te_fl::dispatch
