#pragma once

#include "te_fl/nn/autograd/parameter.hpp"
#include "te_fl/nn/autograd/recompute.hpp"

namespace te_fl::nn::detail {

// Called in both runs before a forward reads the parameter; null: none. FAILED_PRECONDITION if the
// parameter was written between the runs.
Status same_parameter(const Parameter* parameter);

}  // namespace te_fl::nn::detail
