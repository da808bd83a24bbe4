#pragma once

#include <cstdint>

#include "te_fl/device.hpp"
#include "te_fl/op_manager.hpp"
#include "te_fl/status.hpp"

namespace te_fl::nn::detail {

// The options of a call on `device`, on the calling thread's stream, with the next `count` random
// numbers of its context. In the second run of a recomputed piece they are the first run's.
// FAILED_PRECONDITION if it is captured into a graph whose launches do not advance the context.
Result<CallOptions> random_options(int64_t count, const Device& device);

}  // namespace te_fl::nn::detail
