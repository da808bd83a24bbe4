#pragma once

#include <functional>
#include <string>
#include <vector>

#include "conformance/huge/sampled.hpp"

// Cases with tensors of more than 2^31 elements for all ops of the catalogue. They cover the known
// ways in which the backends traverse tensors: aligned and odd extents, all layouts, all scaling
// modes, rows that fit a kernel's registers and rows that do not. conformance/cases lists the cases
// of each family; the header of the family's name in this folder implements them.
namespace te_fl::huge {

struct Case {
  std::string op;
  std::string what;  // description of the case
  std::function<void(Run&)> run;
};
using Cases = std::vector<Case>;

// Extents of rows: kCols is a multiple of all block and vector sizes, kOddCols a multiple of none.
inline constexpr int64_t kCols = 4096, kOddCols = 4099;

Cases all_cases();

}  // namespace te_fl::huge
