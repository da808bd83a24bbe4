#pragma once

#include "te_fl/nn/autograd/parameter.hpp"
#include "te_fl/nn/autograd/recompute.hpp"

namespace te_fl::nn::detail {

// Called before a forward reads the parameter (may be null), in the first run and in its
// recomputation. FAILED_PRECONDITION if the parameter was written between the two runs.
Status same_parameter(const Parameter* parameter);

}  // namespace te_fl::nn::detail
