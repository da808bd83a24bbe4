#pragma once

#include <cmath>

namespace te_fl::reference {

// The larger value; NaN if either is NaN, so that a row with a NaN score does not look like a fully
// masked row.
inline double max_or_nan(double a, double b) { return std::isnan(a) || a > b ? a : b; }

}  // namespace te_fl::reference
