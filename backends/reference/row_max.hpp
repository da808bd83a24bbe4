#pragma once

#include <cmath>

namespace te_fl::reference {

// Returns the larger value, or NaN if a or b is NaN, so that a row with a NaN score is not mistaken
// for a fully masked row.
inline double max_or_nan(double a, double b) { return std::isnan(a) || a > b ? a : b; }

}  // namespace te_fl::reference
