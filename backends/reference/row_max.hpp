#pragma once

#include <cmath>

namespace te_fl::reference {

// The larger one; NaN if either is, so that a NaN score is never mistaken for a masked row.
inline double max_or_nan(double a, double b) { return std::isnan(a) || a > b ? a : b; }

}  // namespace te_fl::reference
