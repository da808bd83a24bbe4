// The default values of the ops' argument structs. Independent of Python.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "te_fl/plugin.h"

namespace te_fl::python {

// The argument struct as C++ default-initialises it; for an op outside the catalogue, the schema's
// neutral values.
std::vector<std::byte> default_arguments(const te_fl_op_schema& schema);

// Writes a scalar argument (bool, i32, i64, f32, f64, enum), converted to the argument's type.
void put_scalar(std::vector<std::byte>& args, const te_fl_arg_desc& arg, double value);

// Splits a space-separated list; null gives an empty list.
std::vector<std::string> split_words(const char* text);

}  // namespace te_fl::python
