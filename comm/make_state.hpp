#pragma once

#include <chrono>
#include <memory>

#include "comm/state.hpp"
#include "te_fl/comm.hpp"

namespace te_fl::comm {

// The common implementation of Comm::create() and Comm::split(). For split(), `parent` and `color`
// are passed to the provider, if it supports splitting. For create(), `parent` is null and `color`
// is ignored.
Result<std::shared_ptr<Comm::State>> make_state(const CommOptions& options,
                                                const Comm::State* parent, int color);
// The timeout of the options, or else TE_FL_COMM_TIMEOUT_MS.
Result<std::chrono::milliseconds> checked_timeout(const CommOptions& options);

}  // namespace te_fl::comm
