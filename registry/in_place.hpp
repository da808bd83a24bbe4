#pragma once

#include <string>

#include "te_fl/plugin.h"

namespace te_fl::registry {

// May an output of this op share memory with an input?
bool allows_in_place(const te_fl_op_schema& schema) noexcept;

// Empty, or which output has the memory of which input in this call: "output 'y' has the memory of
// 'x'". Only pairs that the schema allows are looked at; the others were refused before.
std::string shared_in_place(const te_fl_op_schema& schema, const void* args);

}  // namespace te_fl::registry
