#pragma once

#include <string>
#include <vector>

#include "conformance/case.hpp"

namespace te_fl::conformance {

// Lists what the schemas allow and no case of the table does: ops, dtypes and scaling modes of each
// tensor argument, optional arguments given and left out, both values of flags, every value of an
// enum, scalars away from their neutral value, tensors in the memory of each input that they may
// take. One line each.
std::vector<std::string> uncovered(const Table& table);

}  // namespace te_fl::conformance
