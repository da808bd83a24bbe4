#pragma once

#include <string>

#include "te_fl/plugin.h"

namespace te_fl::registry {

// True if an output of the op may share memory with an input.
bool allows_in_place(const te_fl_op_schema& schema) noexcept;

// Describes the first output that shares memory with an input in this call: "output 'y' has the
// memory of 'x'"; empty if none does. Checks only pairs for which the schema allows sharing; the
// argument check has refused the others.
std::string shared_in_place(const te_fl_op_schema& schema, const void* args);

}  // namespace te_fl::registry
