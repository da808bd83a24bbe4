#pragma once

#include <cstdint>

#include "te_fl/device.hpp"
#include "te_fl/op_manager.hpp"
#include "te_fl/status.hpp"

namespace te_fl::nn::detail {

// The options for a call on `device`: the calling thread's stream, and the next `count` random
// numbers of the thread's context. In activation recomputation, the second run of a forward uses
// the random numbers of the first run. FAILED_PRECONDITION if the call is captured into a graph
// whose launches do not advance the context.
Result<CallOptions> random_options(int64_t count, const Device& device);

}  // namespace te_fl::nn::detail
