#pragma once

#include <string>
#include <vector>

#include "te_fl/export.hpp"

namespace te_fl {

// The ops that exist only as Python functions with the arguments of Transformer Engine's extension
// module: in a registry they are the ops "tex::NAME" (docs/transformer-engine-functions.md). A
// policy's lists may name them before they are registered.
TE_FL_API std::vector<std::string> tex_op_names();

}  // namespace te_fl
