#pragma once

#include <string>
#include <vector>

#include "conformance/case.hpp"

namespace te_fl::conformance {

// Lists everything that the op schemas allow and no case uses, one line each: ops, dtypes and
// scaling modes of each tensor argument, optional arguments present and absent, both values of
// flags, all values of enums, non-neutral scalars, and outputs in the memory of each input for
// which the schema allows it.
std::vector<std::string> uncovered(const Table& table);

}  // namespace te_fl::conformance
