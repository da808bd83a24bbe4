#pragma once

// Helpers for backends with gated activations whose two halves, a and b, are interleaved in blocks
// of columns (glu_interleave_size). They check what the op's schema cannot express and compute the
// position of a column. Checks throw INVALID_ARGUMENT, clean. Header-only.

#include <cstdint>
#include <string>

#include "te_fl/backend.hpp"

namespace te_fl::backend {

// Throws if a half of `half` columns does not divide into blocks of `interleave` columns.
inline void check_interleave(int64_t interleave, int64_t half) {
  if (interleave == 0 || half % interleave == 0) return;
  invalid("glu_interleave_size is " + std::to_string(interleave) +
          "; it is 0, or divides the columns of a half, of which there are " +
          std::to_string(half));
}

// Positions of the columns in a row that holds the halves a and b of `half` columns each. With
// `interleave` 0 half b follows half a. Otherwise blocks of `interleave` columns of a and b
// alternate.
struct HalvesOfRow {
  int64_t half, interleave;

  int64_t place_of_a(int64_t col) const {
    return interleave == 0 ? col : col / interleave * 2 * interleave + col % interleave;
  }
  // Distance from a column of a to the same column of b.
  int64_t distance() const { return interleave == 0 ? half : interleave; }
  // Number of contiguous columns of a, starting at col.
  int64_t run(int64_t col) const {
    return interleave == 0 ? half - col : interleave - col % interleave;
  }
};

}  // namespace te_fl::backend
