// The values of the ops' argument structs before any argument is given. Knows nothing of Python.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "te_fl/plugin.h"

namespace te_fl::python {

// The struct of an op of the catalogue as C++ makes it; of another op the neutral values.
std::vector<std::byte> default_arguments(const te_fl_op_schema& schema);

// Writes a scalar argument (bool, i32, i64, f32, f64, enum) in its own type.
void put_scalar(std::vector<std::byte>& args, const te_fl_arg_desc& arg, double value);

// The words of a space separated list; null has none.
std::vector<std::string> words_of(const char* text);

}  // namespace te_fl::python
