#pragma once

#include <chrono>
#include <memory>

#include "comm/rep.hpp"
#include "te_fl/comm.hpp"

namespace te_fl::comm {

// All that Comm::create() and Comm::split() have in common. `parent` and `color`: what it is split
// off by the provider, if it can do so; null and any: it is made by create().
Result<std::shared_ptr<Comm::Rep>> make_rep(const CommOptions& options, const Comm::Rep* parent,
                                            int color);
// The options' time-out, or TE_FL_COMM_TIMEOUT_MS.
Result<std::chrono::milliseconds> timeout_of(const CommOptions& options);

}  // namespace te_fl::comm
