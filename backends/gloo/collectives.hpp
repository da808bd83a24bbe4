#pragma once

#include <vector>

#include "te_fl/plugin.h"

namespace te_fl::gloo_ranks {

// The descriptors of all collective ops.
void append_collectives(std::vector<te_fl_op_desc>& ops);

// Between the two, this thread's sends and receives are kept, and begin together; see R33.
void group_start();
void group_end();  // throws the first failure

}  // namespace te_fl::gloo_ranks
