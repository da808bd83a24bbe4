#pragma once

#include "dispatch/call.hpp"

namespace te_fl::dispatch {

// Tries one implementation: supports(), lock, plan, scratch, run(); on copies in host memory if
// `step` says so. Neither counts nor falls back. The status is the implementation's; its words go
// to `errors`.
te_fl_status attempt(const Call& call, const Step& step, bool deterministic,
                     core::ErrorText& errors);

}  // namespace te_fl::dispatch
