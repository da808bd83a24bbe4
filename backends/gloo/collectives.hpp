#pragma once

#include <vector>

#include "te_fl/plugin.h"

namespace te_fl::gloo_ranks {

// Appends the descriptors of all collective ops.
void append_collectives(std::vector<te_fl_op_desc>& ops);

// Between group_start() and group_end(), this thread's sends and receives are recorded; group_end()
// starts them together (rule R33).
void group_start();
void group_end();  // throws the first failure of the group

}  // namespace te_fl::gloo_ranks
